"""What a person looks at: tables and figures made from runs, evaluations and benchmarks. `page.py` builds the page."""
