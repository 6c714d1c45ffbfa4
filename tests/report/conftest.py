from support.made_runs import make_run  # noqa: F401
