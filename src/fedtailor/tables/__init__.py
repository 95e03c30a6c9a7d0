"""The analyst's product: a fit of tables with its record, explanation, updates and drift."""
