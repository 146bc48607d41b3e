"""megatron-core under the contract: specs, patches with undo, a CPU device. Adapts shapes, weights and groups; no arithmetic lives here."""
