"""A table of trainers against rollouts on one model: every side scores the same tokens once, every pair is compared."""
