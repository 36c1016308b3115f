"""`python -m drafter.pipeline`, which run_pipeline.sh starts."""

from drafter.pipeline.run import main

raise SystemExit(main())
