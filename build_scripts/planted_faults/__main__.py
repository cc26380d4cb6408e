"""Run the tool: processes of a fork server cannot import functions from this module."""

from planted_faults.planting import main

if __name__ == "__main__":
    main()
