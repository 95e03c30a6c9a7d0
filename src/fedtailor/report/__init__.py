"""One self-contained HTML page on a run or a comparison, written to a file or served while the run goes on."""
