"""What the operating system decides: processes, threads, memory limits, ranks of several devices."""
