"""The data plane: a sized pool, choice, health and admission. It knows nothing of evals."""
