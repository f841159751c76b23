"""Bugs of the kind that such tools have had. A row of the catalogue counts only if one of them makes its tests fail.

A plant is applied to a copy of the repository in which the tests of its rows run, so it reaches every process that they start.
`planting.py` explains the edits.
"""

from __future__ import annotations

from tests.faults.planting import Plant, always, catch, condition, drop, never, plant, replace, result, statement, value

PLANTS: tuple[Plant, ...] = (
    # checkpoints
    plant(
        "a checkpoint is written in place",
        "worker.checkpoint.save:Checkpointer._write",
        value("stage", "final"),
        drop("publish"),
        rows="F070",
    ),
    plant(
        "files are not synced",
        "worker.checkpoint.storage:HashingStream.close",
        replace("DISK.fsync", "lambda file: file.flush()"),
        rows="F071",
    ),
    plant("digests are not compared", "run.manifest:_damage_of", never("digest_file"), rows="F072 F073 F076"),
    plant("a missing file is no damage", "run.manifest:_damage_of", statement("missing", "return None"), rows="F074"),
    plant("kind and step of a manifest are not read", "run.directory:inspect_checkpoint", never("CHECKPOINT_KIND step"), rows="F077 F082"),
    plant("links are followed", "run.manifest:_passes_a_link", never("path.is_symlink"), rows="F080"),
    plant(
        "files that came later are damage",
        "run.manifest:damage",
        result("_ + [Damage(one.name, 'later') for one in root.rglob('*~')]"),
        rows="F075",
    ),
    plant(
        "each rank decides for itself", "worker.checkpoint.restore:agreed_checkpoint", replace("gather", "lambda mine: [mine]"), rows="F078"
    ),
    plant("rotation deletes in place", "worker.checkpoint.rotation:rotate", value("hidden", "old.path"), drop("DISK.rename"), rows="F083"),
    plant(
        "whatever is hidden is a leftover",
        "worker.checkpoint.rotation:remove_leftovers",
        replace("run.path.glob", "lambda _: run.path.glob('.*')"),
        rows="F089",
    ),
    plant(
        "only a checkpoint that can be written to is one",
        "run.directory:inspect_checkpoint",
        condition("path.is_dir", "_ or not path.stat().st_mode & 0o200 or path.parent.name[0] == 'o'"),
        rows="F090",
    ),
    plant(
        "a full disk is not told", "worker.checkpoint.storage:HashingStream.write", statement("raise", "return view.nbytes"), rows="F053"
    ),
    plant("a failed save leaves its stage", "worker.checkpoint.save:Checkpointer._write", drop("shutil.rmtree"), rows="F056"),
    plant(
        "every save keeps a file open",
        "worker.checkpoint.save:Checkpointer._save",
        statement("self._snapshot", "self.__dict__.setdefault('kept', []).append(open('/dev/null')); _"),
        rows="F088",
    ),
    plant("the last save may fail", "worker.setup:close", drop("raise"), rows="F065"),
    # resume
    plant(
        "generators start anew",
        "worker.checkpoint.restore:restore_rng",
        drop("set_rng_state"),
        rows="F091 F042 F092 F094 F095 F097 F100 F043 F064",
        by=(
            "faults/test_train.py::stop_and_resume_at_any_step_continues_losses[3]",
            "faults/test_train.py::rank_killed_in_any_phase_ends_the_others_and_the_run_resumes[1-forward-8]",
            "faults/test_train.py::recomputation_draws_same_dropout_masks_after_resume",
            "faults/test_train.py::five_crashes_in_a_row_lose_nothing",
            "faults/test_train.py::run_with_all_ranks_killed_resumes",
            "faults/test_train.py::signal_during_a_save_stops_after_it[60]",
        ),
    ),
    plant("the optimizer starts anew", "worker.checkpoint.restore:restore_optimizer", drop("load_optimizer"), rows="F086 F095"),
    plant(
        "the schedule starts anew",
        "worker.checkpoint.restore:restore_schedule",
        statement("scheduler.last_epoch", "step = 0; _"),
        rows="F098 F091",
    ),
    plant(
        "all ranks take all the sums",
        "worker.checkpoint.restore:restore_own",
        statement("return sums", "return {**all_own[0], 'sums': sums}"),
        rows="F093",
    ),
    plant("all ranks draw the same", "worker.checkpoint.state:seed_for_rank", replace("dist.get_rank", "lambda: 0"), rows="F096"),
    plant(
        "metrics are cut a step late",
        "run.metrics_file:MetricsFile._truncate",
        condition("step resume_step", "step <= (resume_step or 0) + 1"),
        rows="F099",
    ),
    plant(
        "evaluation draws from the training's generator",
        "model.shard.gathering:outside_step",
        replace("torch.random.fork_rng", "lambda *_, **__: (torch.rand(1), torch.no_grad())[1]"),  # one draw, not restored
        rows="F091 F064",
        by=(
            "faults/test_train.py::stop_and_resume_at_any_step_continues_losses[3]",
            "faults/test_train.py::signal_during_a_save_stops_after_it[60]",
        ),
    ),
    plant("newest is by time", "run.directory:complete_checkpoints", replace("c.step", "c.path.stat().st_mtime"), rows="F057"),
    plant("checkpoints of other models load", "worker.checkpoint.state:_check_names", drop("raise"), rows="F084"),
    # signals and supervision
    plant(
        "each rank stops by its own request",
        "worker.agreement:StopVote.exchange",
        replace("self._tensor.item", "lambda: mine"),
        rows="F061 F068",
        by=(
            "parity/test_resume.py::signal_to_one_rank_saves_on_all_and_resume_continues",
            "faults/test_train.py::signal_in_last_steps_keeps_final_checkpoint[10]",
        ),
    ),
    plant("no process ends with its parent", "core.parent_death:die_with_parent", never("libc.prctl"), rows="F066"),
    plant("a second signal within a moment stops at once", "worker.signals", value("ECHO_SECONDS", "0.0"), rows="F063"),
    plant("a tracker may end the run", "worker.observe.trackers:Guarded._serve", catch("ZeroDivisionError"), rows="F069"),
    # numbers
    plant("numbers that are none are used", "worker.gradients:GradientGate.settle", never("math.isfinite"), rows="F049 F050"),
    plant(
        "a step without targets has loss 0",
        "worker.trainer:FsdpTrainer.get_batch_samples",
        never("total"),
        rows="F021",
        by=("faults/test_numbers.py::step_without_targets_is_an_error",),
    ),
    plant(
        "out of memory is a failure like others",
        "worker.observe.out_of_memory:is_host_out_of_memory",
        replace("MemoryError", "ZeroDivisionError"),
        rows="F047",
    ),
    plant(
        "a full device is a failure like others",
        "worker.observe.out_of_memory:is_device_out_of_memory",
        replace("OutOfMemoryError", "ZeroDivisionError"),
        rows="F048",
    ),
    plant(
        "the run directory is made again",
        "run.metrics_file:MetricsFile.write",
        statement("self._append", "self._path.parent.mkdir(exist_ok=True); (self._path.parent / 'x').touch(); _"),
        rows="F055",
    ),
    # recipe
    plant("two documents are one", "recipe.read.yaml_tree:_Composer.document", drop("two-documents"), rows="F001"),
    plant("the last of two keys wins", "recipe.read.yaml_tree:_Composer._insert", always("first"), rows="F002 F003"),
    plant("1e400 is a number", "recipe.scalars:_float", condition("math.isfinite", "math.isnan(value)"), rows="F004"),
    plant(
        "the recipe may be fifty times as large",
        "recipe.read.yaml_tree:_Composer._count",
        condition("MAX_NODES", "self._nodes > 50 * MAX_NODES"),
        rows="F005",
    ),
    plant("nesting has no limit", "recipe.read.yaml_tree:_Composer._descend", never("MAX_DEPTH"), rows="F006"),
    plant("tags are taken", "recipe.read.yaml_tree:_Composer._node", drop("yaml-tag"), rows="F007"),
    plant(
        "pipes are opened and waited for",
        "recipe.read.yaml_text:_read_bytes",
        condition("stat.S_ISREG", "stat.S_ISDIR(facts.st_mode)"),
        rows="F008",
    ),
    plant("a key may be set twice", "recipe.read.overrides:apply_overrides", condition("_overlap", "_ and not path"), rows="F009"),
    # data
    plant("lines are counted from 0", "data.read.readers:_lines", value("number", "-1"), rows="F012"),
    plant("a byte order mark is text", "data.read.readers:_open_text", drop("file.read"), rows="F013"),
    plant("half surrogate pairs are text", "data.read.json_rows:_checked", never("UNPAIRED"), rows="F014"),
    plant("a key may stand twice in a row", "data.read.json_rows:_unique", never("pairs"), rows="F015"),
    plant("rows have no limit", "data.read.readers:_lines", never("len MAX_ROW_BYTES"), rows="F017 F020"),
    plant("CSV fields are matched as far as they go", "data.read.readers:_csv_row", never("fields header"), rows="F018"),
    plant("a directory is made in place", "core.atomic:staging_place", result("_ if fills else final"), rows="F029 F102"),
    plant("data may change while they are read", "data.build:build_store", drop("data-changing"), rows="F028"),
    plant("too few rows are enough", "data.preparation:_refuse_few_rows", condition("rows wanted", "rows < 1"), rows="F019"),
    # launch
    plant("variables of another job stay", "launch.command.rank_environment:clean", result("dict(environment), removed"), rows="F034"),
    plant("a lock is followed through a link", "core.ownership", replace("os.O_NOFOLLOW", "0"), rows="F123"),
    plant("a lock is only a file", "core.ownership:_claim", replace("fcntl.LOCK_EX", "fcntl.LOCK_SH"), rows="F038 F079"),
    plant("a device named twice is one", "core.devices:select", never("chosen"), rows="F035"),
    # secrets and code
    plant(
        "metadata is unpickled as it is",
        "worker.checkpoint.storage:RestrictedReader.read_metadata",
        statement("METADATA_NAME", "return super().read_metadata(*args, **kwargs)"),
        rows="F114 F115",
    ),
    plant(
        "states of ranks may run code",
        "worker.checkpoint.restore:restore_rng",
        value("weights_only", "False"),
        rows="F114",
        by=("faults/test_worlds.py::pickled_code_in_rank_state_is_not_run",),
    ),
    plant("paths may lead out", "run.manifest:is_inside", always("name.startswith"), always("name.split"), rows="F116"),
    plant("tokens are written as they are", "core.secrets:masked", result("value"), rows="F120"),
    plant("terminal escapes are obeyed", "cli.terminal:printable", always("unicodedata.category"), rows="F124"),
    # merge
    plant(
        "a merge compares only what lies beside the manifest",
        "merge.verify.integrity:_expected_files",
        condition("path.is_relative_to", "path.parent == checkpoint"),
        rows="F104",
    ),
    plant("holes in a file are skipped", "core.safetensors_header:read_header", never("entry.first_byte"), rows="F117"),
    plant("a merge fills a disk that is full", "merge.destination:check_space", never("free_bytes"), rows="F103"),
    plant(
        "numbers that are none are merged",
        "merge.copy.values:all_finite",
        statement("return _LARGEST_FINITE_BITS", "return True"),
        rows="F106",
    ),
    plant(
        "values are cut instead of rounded",
        "merge.copy.values:convert",
        statement("values.dtype", "values = np.trunc(values * 64) / 64; _"),
        rows="F113",
    ),
    plant("an output that exists is replaced", "merge.destination:_check_existing", never("overwrite"), rows="F109"),
    # what is supervised
    plant("ranks need not be alike", "worker.agreement:check_same", never("first"), rows="F032"),
    plant("the loader's processes take a stop for theirs", "worker.dataset:loader", value("worker_init_fn", "None"), rows="F062"),
    plant(
        "nothing is started again",
        "launch.supervise.attempts:is_transient",
        result("False"),
        rows="F041",
        by=("launch/test_restart.py::killed_rank_restarts_the_run_with_a_message_and_a_metrics_event",),
    ),
    plant("what fails each time is started again", "launch.supervise.attempts:decide", never("failure.step"), rows="F101"),
    plant("a stopped rank is not late", "launch.supervise.hang:late_ranks", statement("return held", "return []"), rows="F037 F044"),
    plant("collectives are not counted", "launch.supervise.hang:late_ranks", statement("return late", "return []"), rows="F046"),
    plant(
        "bytes moved are no progress",
        "worker.observe.heartbeat:HeartbeatWriter._count_moved_bytes",
        condition("self._phase", "self._phase is None"),
        rows="F087",
    ),
    plant("a terminal that goes away ends the run", "cli.terminal:write_text", condition("errno.EPIPE", "error.errno"), rows="F060"),
    plant(
        "a current directory that is gone is a bug",
        "cli.output:_file_system_problem",
        never("FileNotFoundError error.filename"),
        rows="F039",
    ),
    plant("a recipe of another version is a bug", "launch.command.resume:read_resolved", catch("OSError"), rows="F085"),
    # more of recipe, data, merge, security
    plant("a global batch may be rounded", "recipe.world:batch_divides", drop("indivisible"), rows="F010"),
    plant("a home that is not expanded is a name", "recipe.paths:output_directory", result("resolved, _[1][1:]"), rows="F011"),
    plant("a column that is missing is empty", "data.format.formats:_text", statement("RowError", "return ''"), rows="F016"),
    plant("an empty completion is trained", "data.format.formats:FormatSettings._prompt_completion", drop("raise"), rows="F022"),
    plant(
        "a tokenizer may be larger than the embedding",
        "model.loading.model_files:check_vocabulary",
        never("vocabulary_size rows"),
        rows="F024",
    ),
    plant("a template may change its mind", "data.tokenise.chat:render_chat", never("check_repeat"), rows="F025"),
    plant("a port that is taken is tried", "launch.command.accelerate:check_port", drop("probe.bind"), rows="F030"),
    plant(
        "the user's own accelerate config is read",
        "launch.command.accelerate:_argv",
        statement("--config_file", "_; del options['--config_file']"),
        rows="F033",
    ),
    plant("another Python runs the launcher", "launch.command.accelerate:_argv", replace("sys.executable", "'python3'"), rows="F040"),
    plant(
        "files are for their owner alone",
        "core.atomic:Disk.open",
        statement("return", "file = open(path, mode); os.chmod(path, 0o600); return file"),
        rows="F111",
    ),
    plant("a stranger's recipe may run code", "jobs.session:refuse_code", never("model.trust_remote_code"), rows="F118"),
    plant(
        "a tied head is written twice",
        "merge.copy.ties:find_ties",
        statement("return ties", "return Tied({}, {KEY: True} if ties else {})"),
        rows="F107",
    ),
    plant("a limit on file sizes is a bug", "merge.destination", replace("errno.EFBIG", "errno.ENOSPC"), rows="F052 F103"),
    # data that is padded, what strangers send
    plant(
        "what equals the padding is not trained",
        "data.order.collate:collate",
        statement("row.labels", "_; labels[input_ids == pad_token_id] = IGNORE_INDEX"),
        rows="F023",
    ),
    plant("a closed port is a hub", "core.hub:hub_is_reachable", drop("socket.create_connection"), rows="F026"),
    plant("a hub that is busy is one that cannot be reached", "core.hub:HubResource.problem", never("BROKEN_OFF status"), rows="F027"),
    plant(
        "templates are rendered outside the sandbox",
        "data.tokenise.tokenizer:TokenizerEncoder.render",
        value(
            "rendered",
            "__import__('jinja2').Template(template).render(messages=messages, tools=tools, add_generation_prompt=generation_prompt)",
        ),
        rows="F119",
    ),
    plant("machines that are missing are not named", "launch.machines.coordination:Machines.gather", always("present"), rows="F031"),
    plant(
        "the launcher's own traceback is shown", "launch.supervise.verdict:first_exception", replace("text.find", "text.rfind"), rows="F036"
    ),
    plant(
        "the quickest rank is called slow",
        "worker.observe.step_progress:slowest",
        value("rank", "min(range(len(working_seconds)), key=working_seconds.__getitem__)"),
        rows="F045",
    ),
    plant("a row that cannot be read has no name", "worker.dataset:Rows.__getitem__", catch("ZeroDivisionError"), rows="F051"),
    plant(
        "a disk that refuses metrics is told at the end", "worker.callbacks:RunCallback.on_step_end", always("metrics.failure"), rows="F054"
    ),
    plant("the agent gives ranks half a minute to save", "launch.command.accelerate", value("AGENT_SHUTDOWN_SECONDS", "30"), rows="F058"),
    plant(
        "the agent does not pass on Slurm's signal", "launch.command.accelerate", replace("signal.SIGUSR1", "signal.SIGQUIT"), rows="F059"
    ),
    plant(
        "a rank that has said its last word is waited for",
        "launch.supervise.supervisor:Supervisor._end_what_must_end",
        drop("watch.lingering"),
        rows="F067",
    ),
    plant(
        "the ranks' files are counted by a listing",
        "worker.checkpoint.restore:_rank_files",
        result("sorted(path.name for path in Path(checkpoint).glob(live_state.RANK_FILES))"),
        rows="F081",
    ),
    plant(
        "shards of a checkpoint are not looked for",
        "merge.weights:find_weights",
        condition("shards.is_dir SHARD_FOLDER", "place.name == SHARD_FOLDER"),
        rows="F105",
    ),
    plant("a buffer holds a whole tensor", "merge.copy.gather", value("BUFFER_BYTES", "512 << 20"), rows="F108"),
    plant("files are opened when they are read", "merge.formats.reader:SourceFiles.__init__", value("limit", "2"), rows="F110"),
    plant("an adapter is added unscaled", "merge.lora.targets:_add", value("scaling", "1.0 + 0.0 * _"), rows="F112"),
    plant(
        "a manifest does not vouch for itself",
        "run.manifest:Manifest.from_json",
        condition("_digest_of", "not raw.pop('digest')"),
        rows="F077",
    ),
    plant("a tracker is waited for", "worker.observe.trackers:Guarded._pass_on", value("timeout", "None"), rows="F069"),
    plant(
        "a rank does not wait for what it cannot see yet", "worker.checkpoint.restore:_wait_until_visible", never("deadline"), rows="F081"
    ),
)
