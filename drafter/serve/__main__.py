"""`python -m drafter.serve up|wait|status|down ROLE --config FILE`"""

from drafter.serve.roles import main

raise SystemExit(main())
