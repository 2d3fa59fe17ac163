"""What is measured, one suite a file or folder; `core.suite.suites` finds them."""
