"""Operations that a GPU computes by one kernel, of torch or written in Triton."""
