"""The paper's evaluations on lm-evaluation-harness: `rla eval`. See docs/evaluation.md."""
