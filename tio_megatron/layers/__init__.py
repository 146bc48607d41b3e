"""What owns weights or a place in the model, engine-neutral: functions and autograd given a group. Names no engine's symbol."""
