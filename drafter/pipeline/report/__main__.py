"""`python -m drafter.pipeline.report --config FILE`"""

from drafter.pipeline.report.page import main

raise SystemExit(main())
