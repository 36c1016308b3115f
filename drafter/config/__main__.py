"""`python -m drafter.config` prints every setting with its default and its meaning."""

from drafter.config.reference import main

raise SystemExit(main())
