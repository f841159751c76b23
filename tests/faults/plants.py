"""Planted bugs, of kinds that such tools have had. A row of the catalogue counts only if one of them makes
its tests fail.

A plant is applied to a copy of the repository in which the tests of its rows run, so it reaches every process
that they start. `planting.py` explains the edits.
"""

from __future__ import annotations

from tests.faults.planting import (
    Plant,
    always,
    catch,
    condition,
    drop,
    never,
    plant,
    replace,
    result,
    statement,
    value,
)

PLANTS: tuple[Plant, ...] = (
    # checkpoints
    plant(
        "checkpoint written in place",
        "worker.checkpoint.save:Checkpointer._write",
        value("stage", "final"),
        drop("publish"),
        rows="F070 F125",
    ),
    plant(
        "missing fsync",
        "worker.checkpoint.storage:HashingStream.close",
        replace("DISK.fsync", "lambda file: file.flush()"),
        rows="F071",
    ),
    plant("digests not compared", "run.manifest:_damage_of", never("digest_file"), rows="F072 F073 F076"),
    plant(
        "missing file not reported as damage",
        "run.manifest:_damage_of",
        statement("missing", "return None"),
        rows="F074",
    ),
    plant(
        "kind and step of manifest ignored",
        "run.directory:inspect_checkpoint",
        never("CHECKPOINT_KIND step"),
        rows="F077 F082",
    ),
    plant("symbolic links followed", "run.manifest:_passes_a_link", never("path.is_symlink"), rows="F080"),
    plant(
        "extra files reported as damage",
        "run.manifest:damage",
        result("_ + [Damage(one.name, 'later') for one in root.rglob('*~')]"),
        rows="F075",
    ),
    plant(
        "ranks choose a checkpoint independently",
        "worker.checkpoint.restore:agreed_checkpoint",
        replace("gather", "lambda mine: [mine]"),
        rows="F078",
    ),
    plant(
        "rotation deletes in place",
        "run.rotation:rotate",
        value("hidden", "old.path"),
        drop("DISK.rename"),
        rows="F083",
    ),
    plant(
        "every hidden file removed as a leftover",
        "run.rotation:remove_leftovers",
        replace("run.path.glob", "lambda _: run.path.glob('.*')"),
        rows="F089",
    ),
    plant(
        "read-only checkpoint ignored",
        "run.directory:inspect_checkpoint",
        condition("path.is_dir", "_ or not path.stat().st_mode & 0o200 or path.parent.name[0] == 'o'"),
        rows="F090",
    ),
    plant(
        "full disk not reported",
        "worker.checkpoint.storage:HashingStream.write",
        statement("raise", "return view.nbytes"),
        rows="F053",
    ),
    plant(
        "failed save leaves its stage",
        "worker.checkpoint.save:Checkpointer._write",
        drop("shutil.rmtree"),
        rows="F056 F126",
    ),
    plant(
        "every save leaks an open file",
        "worker.checkpoint.save:Checkpointer._save",
        statement("self._snapshot", "self.__dict__.setdefault('kept', []).append(open('/dev/null')); _"),
        rows="F088",
    ),
    plant("failure of last save ignored", "worker.setup:close", drop("raise"), rows="F065"),
    # resume
    plant(
        "random generators not restored",
        "worker.checkpoint.restore:restore_rng",
        drop("set_rng_state"),
        rows="F091 F042 F092 F094 F095 F097 F100 F043 F064 F141",
        by=(
            "faults/test_train.py::stop_and_resume_at_any_step_continues_losses[3-cpu]",
            "faults/test_train.py::rank_killed_in_any_phase_ends_the_others_and_the_run_resumes[1-forward-8-cpu]",
            "faults/test_train.py::recomputation_draws_same_dropout_masks_after_resume",
            "faults/test_train.py::five_crashes_in_a_row_lose_nothing",
            "faults/test_train.py::run_with_all_ranks_killed_resumes",
            "faults/test_train.py::rank_killed_while_ranks_generate_ends_the_others_and_the_run_resumes",
            "faults/test_train.py::signal_during_a_save_stops_after_it[60-cpu]",
        ),
    ),
    plant(
        "optimizer state not restored",
        "worker.checkpoint.restore:restore_optimizer",
        drop("load_optimizer"),
        rows="F086 F095",
    ),
    plant(
        "schedule not restored",
        "worker.checkpoint.restore:restore_schedule",
        statement("scheduler.base_lrs", "step = 0; _"),
        rows="F098 F091",
    ),
    plant(
        "every rank restores all metric sums",
        "worker.checkpoint.restore:restore_own",
        statement("return sums", "return {**all_own[0], 'sums': sums}"),
        rows="F093",
    ),
    plant(
        "same seed on all ranks",
        "worker.checkpoint.state:seed_for_rank",
        replace("dist.get_rank", "lambda: 0"),
        rows="F096",
    ),
    plant(
        "metrics truncated one step late",
        "run.metrics_file:_is_before",
        condition("step resume_step", "step > (resume_step or 0) + 1"),
        rows="F099",
    ),
    plant(
        "evaluation advances the training generator",
        "model.shard.gathered:outside_step",
        # one draw, not restored
        replace("torch.random.fork_rng", "lambda *_, **__: (torch.rand(1), torch.no_grad())[1]"),
        rows="F091 F064",
        by=(
            "faults/test_train.py::stop_and_resume_at_any_step_continues_losses[3-cpu]",
            "faults/test_train.py::signal_during_a_save_stops_after_it[60-cpu]",
        ),
    ),
    plant(
        "newest checkpoint chosen by mtime",
        "run.directory:complete_checkpoints",
        replace("c.step", "c.path.stat().st_mtime"),
        rows="F057",
    ),
    plant(
        "checkpoint of another model accepted",
        "worker.checkpoint.state:_check_names",
        drop("raise"),
        rows="F084",
    ),
    # signals and supervision
    plant(
        "ranks stop without agreement",
        "worker.agreement:StopVote.exchange",
        replace("self._tensor.item", "lambda: mine"),
        rows="F061 F068",
        by=(
            "parity/test_resume.py::signal_to_one_rank_saves_on_all_and_resume_continues",
            "faults/test_train.py::signal_in_last_steps_keeps_final_checkpoint[10]",
        ),
    ),
    plant(
        "children survive their parent", "core.parent_death:die_with_parent", never("libc.prctl"), rows="F066"
    ),
    plant(
        "duplicate signal treated as a second one",
        "worker.stop_request",
        value("ECHO_SECONDS", "0.0"),
        rows="F063",
    ),
    plant(
        "tracker error ends the run",
        "worker.observe.trackers:Guarded._serve",
        catch("ZeroDivisionError"),
        rows="F069",
    ),
    # numbers
    plant(
        "nonfinite gradients applied",
        "worker.step_checks:GradientGate.check_pending",
        never("math.isfinite"),
        rows="F049 F050",
    ),
    plant(
        "step without targets has loss 0",
        "worker.prepared_trainer:PreparedTrainer.get_batch_samples",
        never("total"),
        rows="F021",
        by=("faults/test_numbers.py::step_without_targets_is_an_error",),
    ),
    plant(
        "host out-of-memory not recognised",
        "model.allocation_errors:is_host_out_of_memory",
        replace("MemoryError", "ZeroDivisionError"),
        rows="F047",
    ),
    plant(
        "device out-of-memory not recognised",
        "model.allocation_errors:is_device_out_of_memory",
        replace("OutOfMemoryError", "ZeroDivisionError"),
        rows="F048",
    ),
    plant(
        "deleted run directory recreated",
        "run.metrics_file:MetricsFile.write",
        statement(
            "self._append", "self._path.parent.mkdir(exist_ok=True); (self._path.parent / 'x').touch(); _"
        ),
        rows="F055",
    ),
    # recipe
    plant(
        "second YAML document ignored",
        "recipe.read.yaml_source:_Composer.document",
        drop("two-documents"),
        rows="F001",
    ),
    plant(
        "duplicate key: last one used",
        "recipe.read.yaml_source:_Composer._insert",
        always("first"),
        rows="F002 F003",
    ),
    plant(
        "infinity accepted as a number",
        "core.units:_float",
        condition("math.isfinite", "math.isnan(value)"),
        rows="F004",
    ),
    plant(
        "node limit fifty times too high",
        "recipe.read.yaml_source:_Composer._count",
        condition("MAX_NODES", "self._nodes > 50 * MAX_NODES"),
        rows="F005",
    ),
    plant(
        "nesting depth not limited",
        "recipe.read.yaml_source:_Composer._descend",
        never("MAX_DEPTH"),
        rows="F006",
    ),
    plant("YAML tags accepted", "recipe.read.yaml_source:_Composer._node", drop("yaml-tag"), rows="F007"),
    plant(
        "FIFO opened as a recipe",
        "core.files:_require_regular",
        condition("stat.S_ISREG", "stat.S_ISDIR(mode)"),
        rows="F008",
    ),
    plant(
        "key overridden twice",
        "recipe.read.overrides:_read_overrides",
        condition("_overlap", "_ and not path"),
        rows="F009",
    ),
    # data
    plant("lines counted from 0", "data.read.readers:_lines", value("number", "-1"), rows="F012"),
    plant("byte order mark kept as text", "data.read.readers:_open_text", drop("file.read"), rows="F013"),
    plant("unpaired surrogates accepted", "data.read.row_files:_checked", never("UNPAIRED"), rows="F014"),
    plant("duplicate keys in a row accepted", "data.read.row_files:_unique", never("pairs"), rows="F015"),
    plant("row size not limited", "data.read.readers:_lines", never("len MAX_ROW_BYTES"), rows="F017 F020"),
    plant(
        "CSV rows with a wrong field count accepted",
        "data.read.readers:_csv_row",
        never("fields header"),
        rows="F018",
    ),
    plant(
        "directory written in place",
        "core.atomic:staging_path",
        result("_ if fills else final"),
        rows="F029 F102",
    ),
    plant(
        "data changed during reading accepted", "data.build:build_store", drop("data-changing"), rows="F028"
    ),
    plant(
        "too few rows accepted",
        "data.preparation:_refuse_few_rows",
        condition("rows wanted", "rows < 1"),
        rows="F019",
    ),
    # launch
    plant(
        "variables of another job kept",
        "launch.command.inherited:clean",
        result("dict(environment), removed"),
        rows="F034",
    ),
    plant("symbolic link accepted as a lock", "core.ownership", replace("os.O_NOFOLLOW", "0"), rows="F123"),
    plant(
        "lock not exclusive",
        "core.ownership:_claim",
        replace("fcntl.LOCK_EX", "fcntl.LOCK_SH"),
        rows="F038 F079",
    ),
    plant("duplicate device accepted", "core.devices:select", never("chosen"), rows="F035"),
    # secrets and code
    plant(
        "metadata unpickled without allow-list",
        "worker.checkpoint.storage:RestrictedReader.read_metadata",
        statement("METADATA_NAME", "return super().read_metadata(*args, **kwargs)"),
        rows="F114 F115",
    ),
    plant(
        "rank states unpickled without restriction",
        "worker.checkpoint.restore:_read_rank",
        value("weights_only", "False"),
        rows="F114",
        by=("faults/test_worlds.py::pickled_code_in_rank_state_is_not_run",),
    ),
    plant(
        "paths outside the checkpoint accepted",
        "core.files:is_inside",
        always("name.startswith"),
        always("name.split"),
        rows="F116",
    ),
    plant("secrets not masked", "core.secrets:masked", result("value"), rows="F120"),
    plant(
        "terminal escapes not escaped",
        "cli.terminal_text:printable",
        always("unicodedata.category"),
        rows="F124",
    ),
    # merge
    plant(
        "merge checks only files next to the manifest",
        "merge.manifest_check:_expected_files",
        condition("path.is_relative_to", "path.parent == checkpoint"),
        rows="F104",
    ),
    plant(
        "holes in a safetensors file accepted",
        "core.tensors.safetensors_header:read_header",
        never("entry.first_byte"),
        rows="F117",
    ),
    plant(
        "free space not checked before a merge",
        "merge.output_directory:check_space",
        never("free_bytes"),
        rows="F103",
    ),
    plant(
        "NaN and infinity merged",
        "merge.copy.values:all_finite",
        statement("return _LARGEST_FINITE_BITS", "return True"),
        rows="F106",
    ),
    plant(
        "values truncated instead of rounded",
        "merge.copy.values:convert",
        statement("values.dtype", "values = np.trunc(values * 64) / 64; _"),
        rows="F113",
    ),
    plant(
        "existing output replaced", "merge.output_directory:_check_existing", never("overwrite"), rows="F109"
    ),
    # what is supervised
    plant(
        "differing ranks accepted", "cluster.doctor_checks:differences_of_ranks", never("first"), rows="F032"
    ),
    plant(
        "loader processes handle stop signals",
        "worker.rows.batches:loader",
        value("worker_init_fn", "None"),
        rows="F062",
    ),
    plant(
        "failed launch not restarted",
        "launch.supervise.restarts:is_transient",
        result("False"),
        rows="F041",
        by=("launch/test_attempts.py::killed_rank_restarts_the_run_with_a_message_and_a_metrics_event",),
    ),
    plant(
        "deterministic failure restarted",
        "launch.supervise.restarts:decide_restart",
        never("failure.step"),
        rows="F101",
    ),
    plant(
        "stopped rank not reported as late",
        "launch.supervise.hang_diagnosis:late_ranks",
        statement("return held", "return []"),
        rows="F037 F044",
    ),
    plant(
        "collective sequence numbers ignored",
        "launch.supervise.hang_diagnosis:late_ranks",
        statement("return late", "return []"),
        rows="F046",
    ),
    plant(
        "bytes moved not counted as progress",
        "worker.observe.heartbeat:HeartbeatWriter._count_moved_bytes",
        condition("self._phase", "self._phase is None"),
        rows="F087",
    ),
    plant(
        "closed terminal ends the run",
        "cli.terminal:write_text",
        condition("GONE is_result", "True"),
        rows="F060",
    ),
    plant(
        "deleted working directory reported as a bug",
        "cli.failures:_file_system_problem",
        never("is_of_system FileNotFoundError"),
        rows="F039",
    ),
    plant(
        "recipe of another version reported as a bug",
        "launch.command.resume:parse_resolved",
        catch("OSError"),
        rows="F085",
    ),
    # more of recipe, data, merge, security
    plant(
        "indivisible global batch accepted", "recipe.world:batch_divides", drop("indivisible"), rows="F010"
    ),
    plant(
        "unexpanded home directory accepted",
        "recipe.references:output_directory",
        result("resolved, _[1][1:]"),
        rows="F011",
    ),
    plant(
        "missing column read as empty text",
        "data.format.formats:_text",
        statement("RowError", "return ''"),
        rows="F016",
    ),
    plant(
        "empty completion accepted",
        "data.format.formats:FormatSettings._prompt_completion",
        never("completion.strip"),
        rows="F022",
    ),
    plant(
        "tokenizer larger than the embedding accepted",
        "model.model_files:check_vocabulary",
        never("has_grown grows_embedding"),
        rows="F024",
    ),
    plant(
        "nondeterministic template accepted",
        "data.tokenise.chat:render_chat",
        never("check_repeat"),
        rows="F025",
    ),
    plant("used port not detected", "core.port_checks:port_refusal", drop("probe.bind"), rows="F030"),
    plant(
        "user's accelerate config used",
        "launch.command.accelerate:_argv",
        statement("--config_file", "_; del options['--config_file']"),
        rows="F033",
    ),
    plant(
        "launcher runs with another Python",
        "launch.command.accelerate:_argv",
        replace("sys.executable", "'python3'"),
        rows="F040",
    ),
    plant(
        "files readable by their owner only",
        "core.atomic:Disk.open",
        statement("return", "file = open(path, mode); os.chmod(path, 0o600); return file"),
        rows="F111",
    ),
    plant(
        "remote code allowed by the recipe",
        "jobs.recipes:code_not_allowed",
        never("model.trust_remote_code"),
        rows="F118",
    ),
    plant(
        "tied head written twice",
        "merge.copy.ties:find_ties",
        statement("return ties", "return Tied({}, {KEY: True} if ties else {})"),
        rows="F107",
    ),
    plant(
        "file size limit reported as a bug",
        "merge.output_directory",
        replace("errno.EFBIG", "errno.ENOSPC"),
        rows="F052 F103",
    ),
    # data that is padded, what strangers send
    plant(
        "tokens equal to the padding id not trained",
        "data.collate:collate",
        statement("row.labels", "_; labels[input_ids == pad_token_id] = IGNORE_INDEX"),
        rows="F023",
    ),
    plant(
        "hub reachability not probed",
        "core.hub:hub_is_reachable",
        drop("socket.create_connection"),
        rows="F026",
    ),
    plant(
        "busy hub reported as unreachable",
        "core.hub:HubResource.problem",
        never("BROKEN_OFF status"),
        rows="F027",
    ),
    plant(
        "template rendered outside the sandbox",
        "data.tokenise.tokenizer:TokenizerEncoder.render",
        value(
            "rendered",
            "__import__('jinja2').Template(template).render(messages=messages, tools=tools, "
            "add_generation_prompt=generation_prompt)",
        ),
        rows="F119",
    ),
    plant(
        "missing machines not named",
        "launch.machines.rendezvous:Machines.gather",
        always("present others"),
        rows="F031",
    ),
    plant(
        "launcher traceback shown instead of the rank's",
        "launch.supervise.end_of_launch:first_exception",
        replace("text.find", "text.rfind"),
        rows="F036",
    ),
    plant(
        "fastest rank reported as slow",
        "worker.observe.stragglers:slowest",
        value("rank", "min(range(len(ranks)), key=own.__getitem__)"),
        rows="F045",
    ),
    plant(
        "unreadable row not named",
        "worker.rows.batches:Rows.__getitem__",
        catch("ZeroDivisionError"),
        rows="F051",
    ),
    plant(
        "metrics write error reported only at the end",
        "worker.callbacks:RunCallback.on_step_end",
        always("metrics.failure"),
        rows="F054",
    ),
    plant(
        "agent shutdown timeout of 30 s",
        "launch.command.accelerate",
        value("AGENT_SHUTDOWN_SECONDS", "30"),
        rows="F058",
    ),
    plant(
        "SIGUSR1 not forwarded by the agent",
        "launch.command.accelerate",
        replace("signal.SIGUSR1", "signal.SIGQUIT"),
        rows="F059",
    ),
    plant(
        "lingering rank not ended",
        "launch.supervise.supervisor:Supervisor._end_if_needed",
        drop("watch.lingering"),
        rows="F067",
    ),
    plant(
        "rank files found by a directory listing",
        "worker.checkpoint.restore:_rank_files",
        result("sorted(path.name for path in Path(checkpoint).glob(live_state.RANK_FILES))"),
        rows="F081",
    ),
    plant(
        "shard folder not found",
        "merge.weight_formats:find_weights",
        condition("shards.is_dir SHARD_FOLDER", "place.name == SHARD_FOLDER"),
        rows="F105",
    ),
    plant(
        "buffer as large as a full tensor",
        "merge.copy.gather",
        value("BUFFER_BYTES", "512 << 20"),
        rows="F108",
    ),
    plant(
        "source files opened on demand",
        "merge.read.reader:SourceFiles.__init__",
        value("limit", "2"),
        rows="F110",
    ),
    plant(
        "adapter added without scaling",
        "merge.lora.targets:_add",
        value("scaling", "1.0 + 0.0 * _"),
        rows="F112",
    ),
    plant(
        "digest of the manifest ignored",
        "run.manifest:Manifest.from_json",
        condition("digest_of_values", "not raw.pop('digest')"),
        rows="F077",
    ),
    plant(
        "hanging tracker blocks the run",
        "worker.observe.trackers:Guarded._pass_on",
        value("timeout", "None"),
        rows="F069",
    ),
    # adapters
    plant(
        "weights under a continued adapter not compared",
        "model.loading.adapter_files:check_base",
        never("differs_from"),
        rows="F127",
    ),
    plant(
        "contents of the base not in its digest",
        "run.base_model:digest_of_samples",
        drop("file.read"),
        rows="F128",
    ),
    plant(
        "method of an adapter not checked",
        "model.loading.adapter_files:_refuse_other_kinds",
        never("peft_type"),
        rows="F129",
    ),
    plant("target that hits nothing ignored", "model.adapters.targets:_chosen", never("found"), rows="F130"),
    plant(
        "adapters without a gradient not noticed",
        "worker.readback.missing_gradients:adapters_without_gradient",
        never("_ABSENT"),
        rows="F131",
    ),
    plant(
        "scale of adapters not compared",
        "worker.readback.trained:_adapters",
        never("module.scaling"),
        rows="F132",
        by=("parity/test_breaks.py::run_stops_at_a_planted_bug_of_its_adapters[cpu-adapter scaled twice]",),
    ),
    # surroundings
    plant(
        "pickles in archives loaded",
        "data.read.tar_rows:_members",
        value("content", "__import__('pickle').load(archive.extractfile(member)) if ending == 'pkl' else _"),
        rows="F133",
        by=("data/test_row_stream.py::members_of_a_tar_are_grouped_and_pickles_are_not_loaded",),
    ),
    plant(
        "failed job ends the children of all jobs",
        "core.processes:threads",
        value("running", "[child for each in _POOLS for child in each.running]"),
        rows="F134",
    ),
    plant(
        "closed streams stay closed",
        "core.inherited_state:open_standard_streams",
        drop("os.set_inheritable"),
        rows="F135",
    ),
    plant(
        "temporary directories of killed commands stay",
        "core.ownership:_remove_abandoned",
        never("is_ours read_owner"),
        rows="F136",
    ),
    plant("unusable cache not refused", "jobs.recipes:_reason_unusable", catch("KeyError"), rows="F137"),
    plant("CPU time of containers ignored", "core.cgroups:_cores", never("quota period"), rows="F138"),
    plant(
        "full temporary directory ends the command",
        "launch.supervise.early_launch:start_early",
        catch("KeyError"),
        rows="F139",
    ),
    plant(
        "signals stay handled after a job",
        "core.signals:stop_signals_raise",
        statement("handler", "pass"),
        rows="F142",
    ),
    plant("used port not noticed", "core.port_checks:port_refusal", drop("probe.bind"), rows="F140"),
    # devices
    plant(
        "words of a job not quoted",
        "cluster.submit.slurm:_body_values",
        value("words", "list(job.arguments)"),
        rows="F121",
    ),
    plant(
        "names in lines of sbatch not checked",
        "cluster.submit.slurm:_unwritable",
        always("_QUOTABLE"),
        rows="F121",
    ),
    plant(
        "text of a report not escaped",
        "pages.report_page:_template",
        value("autoescape", "False"),
        rows="F122",
    ),
    plant("fault of a GPU not recognised", "worker.main:_outcome_of", never("device_fault"), rows="F143"),
    plant(
        "message of the watchdog ignored",
        "launch.supervise.end_of_launch:native_end",
        result("None"),
        rows="F144",
        by=("launch/test_end_of_launch.py::rank_that_the_watchdog_ended_has_its_message",),
    ),
    plant(
        "refused pinned memory taken for the device's",
        "model.allocation_errors:_is_page_locked",
        value("frames", "[]"),
        rows="F145",
        by=("model/test_allocation_errors.py::pinned_allocation_failure_is_host_memory",),
    ),
    plant(
        "generation of the GPU ignored",
        "recipe.device_choice:compare_gpu",
        value("capability", "None"),
        rows="F146",
        by=("recipe/test_resolve.py::fp8_on_an_old_gpu_is_refused_before_ranks_start",),
    ),
    plant(
        "rank does not wait for late files",
        "worker.checkpoint.restore:_wait_until_visible",
        never("deadline"),
        rows="F081",
    ),
)
