"""The table of the fifty faults in docs/reliability.md, each with the tests that cause it.

python tests/fault_table.py            write the table again; fails if a test is gone
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: python tests/fault_table.py -->", "<!-- end of faults -->"

FAULTS = {
    "kill -9 in an epoch; the resumed run ends bit-identical": "training/test_resume.py::test_killed_and_resumed_is_bit_identical methods/test_all_methods.py::test_killed_and_resumed_is_bit_identical",
    "kill while a checkpoint is written": "training/test_resume.py::test_killed_inside_a_checkpoint_write",
    "temporary files left by a kill": "test_files.py::test_what_a_kill_left_does_not_become_part_of_the_file training/test_resume.py::test_killed_inside_a_checkpoint_write search/test_gallery.py::test_creating_a_gallery_again_after_a_kill",
    "disk full at a checkpoint": "training/test_bad_input.py::test_a_full_disk_keeps_the_old_checkpoint training/test_loop.py::test_full_disk_while_checkpointing_keeps_the_old_one",
    "truncated images": "data/test_images.py::test_truncated training/test_bad_input.py::test_unreadable_images_are_named_counted_and_left_out",
    "empty files, and text named .jpg": "data/test_images.py::test_not_images",
    "CMYK, palettes with alpha, 1 bit, 16 bits, LA": "data/test_images.py::test_cmyk_jpeg data/test_images.py::test_palette_with_transparency data/test_images.py::test_one_bit_and_grey data/test_images.py::test_16_bit_grey data/test_images.py::test_transparent_becomes_white",
    "animated GIF, WebP and PNG": "data/test_images.py::test_first_frame data/test_images.py::test_later_frames_do_not_matter server/test_uploads.py::test_frames_are_not_decoded",
    "the eight EXIF orientations, malformed EXIF": "data/test_images.py::test_exif_orientation data/test_images.py::test_malformed_exif_is_ignored",
    "1×1 pixels, 1×10,000 pixels, too many pixels": "data/test_images.py::test_square data/test_images.py::test_narrow_images_are_squeezed_into_the_square data/test_images.py::test_decompression_bomb",
    "classes of one image, too few for a batch": "training/test_bad_input.py::test_too_little_to_train_on training/test_bad_input.py::test_too_little_to_judge_by_is_said_before_training",
    "an empty class, an empty set, one class": "data/test_datasets.py::test_empty_folders_are_refused data/test_datasets.py::test_one_class_is_enough_only_for_all",
    "one image in two classes or parts": "training/test_bad_input.py::test_the_same_image_in_every_class data/test_datasets.py::test_csv_class_in_train_and_test_is_noted",
    "odd names, loops of links": "training/test_bad_input.py::test_strange_names training/test_bad_input.py::test_link_loops search/test_indexing.py::test_unusual_file_names",
    "a file vanishes during a run": "training/test_bad_input.py::test_a_file_vanishes_before_it_is_decoded training/test_bad_input.py::test_files_vanish_during_training",
    "NaN in the loss": "training/test_loop.py::test_nan_stops_and_names_the_images",
    "identical images and zero vectors (α = 0)": "test_metric.py::test_identical_images_and_zero_vectors_stay_finite",
    "‖u‖ collapses or explodes": "training/test_faults.py::test_a_collapsed_or_inflated_uncertainty_is_reported training/test_bad_input.py::test_exploding_weights_stop_the_run",
    "resume with other options or other data": "training/test_faults.py::test_a_run_is_not_resumed_on_other_data training/test_checkpoint.py::test_other_options_data_and_weights_are_refused training/test_config.py::test_differences_name_what_changed",
    "SIGTERM; a loader process is killed": "training/test_resume.py::test_sigterm_writes_a_checkpoint_and_exits training/test_faults.py::test_a_killed_loader_process_is_one_line_and_the_run_resumes",
    "two runs in one directory": "training/test_loop.py::test_two_runs_in_one_directory",
    "kill -9 in an add and in a compaction": "search/test_kills.py::test_killed_at_random_moments search/test_kills.py::test_killed_in_the_middle search/test_indexing.py::test_killed_at_random_moments",
    "two writers": "test_files.py::test_several_writers_of_one_file search/test_readers.py::test_several_processes_write_at_once search/test_kills.py::test_killed_beside_other_writers",
    "a reader beside a writer": "search/test_readers.py::test_a_reader_beside_a_busy_writer",
    "another dimension or another model": "search/engine_contract.py::test_bound_to_its_model search/test_gallery.py::test_another_model_is_refused",
    "flipped bits and truncation: database, model, calibration, roots, uploads": "search/test_damage.py::test_every_flipped_bit_is_found_or_harmless search/test_damage.py::test_a_database_that_is_cut search/test_integrity.py::test_a_flipped_bit_in_any_file_is_found",
    "a header that claims very many rows": "search/test_damage.py::test_a_header_that_claims_very_many_rows test_fuzz.py::test_models",
    "delete, add again, repeat a request": "search/engine_contract.py::test_adding_again_changes_nothing search/test_gallery_folder.py::test_removing_again_after_a_kill",
    "k > N, k = 0, an empty gallery": "search/test_results.py::test_k_is_a_whole_number search/engine_contract.py::test_an_empty_gallery_answers",
    "NaN and zero vectors": "search/engine_contract.py::test_what_does_not_fit_is_refused search/test_exact.py::test_a_vector_without_direction",
    "a calibration that no longer applies": "calibration/test_risk_control.py::test_drift_in_numbers search/test_gallery.py::test_drift_is_reported search/test_gallery.py::test_unsuitable_calibrations_are_refused",
    "data of an older version": "test_stored_formats.py::test_a_stored_run_and_gallery_open_and_answer_as_then search/test_damage.py::test_another_format_is_refused training/test_bad_input.py::test_a_checkpoint_of_another_version",
    "a body over the limit, with and without its length": "server/test_security.py::test_a_declared_length_above_the_limit server/test_security.py::test_a_body_without_a_declared_length server/test_serve.py::test_an_endless_body_is_refused_and_disconnected",
    "decompression bombs, scans without end": "server/test_uploads.py::test_bombs_of_every_format data/test_images.py::test_scans_are_counted_before_decoding data/test_images.py::test_scans_behind_an_unknown_marker_are_counted server/test_decoders.py::test_bombs_of_scans_and_sides",
    "a wrong type, SVG, PDF, polyglots": "server/test_uploads.py::test_data_that_is_not_an_image server/test_uploads.py::test_a_polyglot_is_served_as_its_image_format",
    "100,000 parts of a form": "server/test_uploads.py::test_a_hundred_thousand_parts",
    "path traversal": "server/test_serve.py::test_no_path_leaves_the_folder search/test_gallery_folder.py::test_no_path_leaves_its_root",
    "addresses as input (none is accepted)": "server/test_uploads.py::test_addresses_are_never_opened",
    "malicious pickles": "test_pickles.py::test_a_malicious_pickle_is_refused_unread",
    "archives that leave their folder": "data/test_layouts.py::test_an_archive_never_leaves_its_place data/test_layouts.py::test_zip_archives_are_refused_unread data/test_layouts.py::test_a_listed_path_that_leaves_the_folder_counts_as_absent",
    "slow clients, broken connections": "server/test_serve.py::test_a_client_with_slow_headers_is_disconnected server/test_serve.py::test_a_client_with_a_slow_body_gets_an_error server/test_serve.py::test_aborted_requests_leave_nothing",
    "overload": "server/test_app.py::test_a_full_queue server/test_serve.py::test_too_many_connections",
    "restart under load; a decoder hangs": "test_chaos.py::test_a_short_run server/test_serve.py::test_a_signal_during_a_request server/test_serve.py::test_a_signal_while_decoders_hang",
    "keys": "server/test_security.py::test_roles_of_all_routes server/test_security_keys.py::test_both_keys_are_always_compared_in_constant_time server/test_schema.py::test_nothing_is_answered_without_a_key",
    "HTML and controls in names": "server/test_page_items.py::test_markup_in_labels_stays_text_everywhere test_cli_search.py::test_names_from_folders_are_escaped",
    "formulas in CSV": "audit/test_decisions.py::test_formulas_are_escaped audit/test_audit_run.py::test_a_formula_in_a_name_a_label_or_a_score_is_quoted",
    "memory in one request and in all": "server/test_decoders.py::test_decoded_images_held_at_once_are_bounded server/test_decoders.py::test_memory_of_a_decoder_is_bounded server/test_security.py::test_too_many_uploads_at_once",
    "other queries of a batch change no answer": "server/test_app_search.py::test_parallel_queries_get_the_same_answers server/test_service_batches.py::test_a_broken_image_fails_only_itself",
    "no traceback reaches a client": "server/test_security.py::test_unexpected_errors_reveal_nothing",
    "decoding bounded in time": "server/test_decoders.py::test_a_hanging_or_crashing_decoder_is_replaced data/test_images.py::test_unusual_files_are_decoded_in_a_process_with_a_deadline data/test_heif.py::test_one_part_used_many_times_ends_at_the_deadline server/test_decoders.py::test_a_picture_whose_decoding_hangs",
}  # fmt: skip


def functions(path: Path) -> set[str]:
    """Return the names of all functions in a file, also of those in classes."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def missing_tests() -> list[str]:
    """Return the tests of the table that do not exist."""
    gone = []
    for test in {test for tests in FAULTS.values() for test in tests.split()}:
        file, _, name = test.partition("::")
        path = ROOT / "tests" / file
        if not path.is_file() or name not in functions(path):
            gone.append(test)
    return sorted(gone)


def table() -> str:
    """Return the table in Markdown."""
    rows = ["| | fault | tests in `tests/` |", "| --- | --- | --- |"]
    for number, (fault, tests) in enumerate(FAULTS.items(), start=1):
        rows.append(f"| {number} | {fault} | {', '.join(f'`{test}`' for test in tests.split())} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """Return the page with the current table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    if gone := missing_tests():
        sys.exit(f"these tests are gone: {', '.join(gone)}")
    PAGE.write_text(with_table(PAGE.read_text()))
