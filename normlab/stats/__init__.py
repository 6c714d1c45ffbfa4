"""Statistics: pure functions of tensors, called inside the step; their values are part of its output."""
