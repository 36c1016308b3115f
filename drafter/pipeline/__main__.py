"""`python -m drafter.pipeline`, which run_pipeline.sh starts."""

from drafter.pipeline.command import main

raise SystemExit(main())
