"""Which tests are thorough: make test leaves them to make test-thorough; CI runs both.

Most are products: every algorithm with every engine, case or device. Of these make test runs a few algorithms of each
kind, and every algorithm in its usual case.
"""

from __future__ import annotations

from functools import cache

import pytest

FEW = (  # one or more of each kind: one model, private parts, two models, entries, degrees, weights, closed forms
    *("fedavg", "fedrep", "ditto", "fedselect", "fedeq", "learn2pfed", "learn2pfed-net", "tailor", "duw-fedavg"),
    "empiricalbayes",
)
PRODUCTS = {  # by test, the name of the parameter that is the algorithm
    "tests/contract/test_engines.py::test_engines_agree_and_learn": "algorithm",
    "tests/contract/test_engines.py::test_order_of_clients_is_irrelevant": "algorithm",
    "tests/contract/test_engines.py::test_absent_clients_are_untouched": "algorithm",
    "tests/contract/test_engines.py::test_a_part_of_the_clients_is_as_a_federation_of_that_part": "algorithm",
    "tests/contract/test_engines.py::test_saved_states_continue_as_the_straight_run": "algorithm",
    "tests/contract/test_pool.py::test_every_algorithm": "algorithm",
    "tests/contract/test_pool.py::test_every_algorithm_stacked_in_the_workers": "algorithm",
    "tests/flare/test_flare.py::test_sites_and_loop_agree": "algorithm",
    "tests/devices/test_algorithms.py::test_the_cpu_s_numbers": "algorithm",
    "tests/devices/test_algorithms.py::test_begun_on_one_and_resumed_on_the_other": "algorithm",
    "tests/docs/test_algorithms.py::test_page": "page",
    "tests/experiments/test_runner.py::test_resumed_run_is_the_straight_run": "name",
    "tests/aggregation/test_federation.py::test_every_algorithm_that_only_sums_can_do_without_replies": "algorithm",
    "tests/silent/test_engines.py::test_models_that_padding_would_disturb": "algorithm",
    "tests/silent/test_engines.py::test_threads_and_workers_do_not_change_a_bit": "algorithm",
}
PROGRAMS = (  # files and tests: processes, browsers, compilers, examples, and pages of the docs that run for a while
    "tests/benchmarks/test_speed.py",
    "tests/devices/test_bench.py",
    "tests/devices/test_runs.py",
    "tests/devices/test_two_units.py",
    "tests/devices/test_workers.py",
    "tests/docs/test_architecture.py::test_the_path_of_a_fit",
    "tests/docs/test_architecture.py::test_the_paths_of_a_federation",
    "tests/docs/test_examples.py::test_example",
    "tests/docs/test_explanation.py::test_hypergradients",
    "tests/docs/test_federation.py",
    "tests/docs/test_fit.py",
    "tests/docs/test_how_to.py",
    "tests/docs/test_new_algorithm.py",
    "tests/docs/test_notebooks.py",
    "tests/docs/test_onboard.py::test_the_page_runs",
    "tests/docs/test_readme.py::test_first_block_in_a_fresh_clone",
    "tests/docs/test_readme.py::test_readme_runs",
    "tests/docs/test_site.py",
    "tests/docs/test_start.py::test_agents",
    "tests/docs/test_start.py::test_flower",
    "tests/docs/test_start.py::test_other_libraries",
    "tests/e2e/test_federation.py",
    "tests/e2e/test_networks.py",
    "tests/e2e/test_operations.py",
    "tests/e2e/test_other_flare.py",
    "tests/e2e/test_processes.py",
    "tests/engines/test_malloc.py",
    "tests/report/test_federation_page.py::test_in_a_browser",
    "tests/engines/test_torchrun.py",
    "tests/inference/test_federation.py",
    "tests/inference/test_profile.py",
    "tests/inference/test_sums.py",
    "tests/metrics/test_streaming.py::test_memory_of_evaluation_does_not_grow_with_the_samples",
    "tests/models/test_lstm.py::test_its_graph_is_for_any_number_of_samples",
    "tests/report/test_browser.py",
    "tests/serving/test_export.py::test_an_equilibrium_is_written_with_all_its_iterations",
    "tests/tools/test_containers.py::test_a_participant_is_provisioned_started_healthy_and_stopped",
    "tests/tools/test_skip_list.py::test_a_new_skip_fails_the_run",
    "tests/trust/test_lying_search.py::test_a_site_that_says_anything_passes_no_bound",
    "tests/trust/test_lying_search.py::test_the_search_finds_a_site_with_rows_of_another_world",
    "tests/world/test_zoo.py::test_every_module",
    "tests/world/test_zoo.py::test_more_of_several_at_once",
)


def is_thorough(item: pytest.Item) -> bool:
    """Whether it runs whole programs, or is one of a product that a few algorithms stand for."""
    name, _, _ = item.nodeid.partition("[")
    if name.startswith(PROGRAMS):
        return True
    call = getattr(item, "callspec", None)
    if name not in PRODUCTS or call is None:
        return False
    algorithm, engine, case = (call.params.get(k) for k in (PRODUCTS[name], "engine", "case"))
    if algorithm in FEW or engine == "vmap2":  # two stacks with padding: where a new algorithm most often differs
        return False
    return not ("test_engines_agree" in name and _is_usual(algorithm, case))


@cache
def _is_usual(algorithm: str, case: str) -> bool:
    from fedtailor.testing.contract import CASES  # not before the tests of devices have made theirs
    from tests.helpers import usual, variants

    return CASES[case] in ({}, usual(variants()[algorithm]))
