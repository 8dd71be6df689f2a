"""What ran on exclusive pCPUs, judged: classes of tasks, verdicts, remedies."""
