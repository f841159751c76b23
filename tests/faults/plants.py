"""Bugs planted by hand, a line or two each, of the kind that such tools have had. A row of the catalogue counts only if one turns it red.

A plant is applied to a copy of the repository, in which the tests of its rows are run: it so reaches every process that they start.
"""

# ruff: noqa: E501  a line of code stands here as it stands in its file

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plant:
    name: str
    file: str
    old: str
    new: str
    rows: tuple[str, ...]
    by: tuple[str, ...] = ()
    """The quickest tests of the rows that see it, where the first of a row would take long: `tests/….py::test_…[…]`."""


def _plant(name: str, file: str, old: str, new: str, *rows: str, by: tuple[str, ...] = ()) -> Plant:
    return Plant(name, f"fsdp_tune/{file}.py", old, new, rows, tuple(f"tests/{test.replace('::', '::test_')}" for test in by))


_IN_PLACE = """        stage = self.run.path / f".{final.name}{STAGE_MARK}{snapshot.step}"
        try:
            manifest = self._fill_stage(snapshot, stage)
            from_rank0(lambda: publish(stage, final, replace=final.exists()), f"publishing {final.name}", self._group)
"""

PLANTS: tuple[Plant, ...] = (
    # checkpoints
    _plant(
        "a checkpoint is written in place",
        "worker/checkpoint",
        _IN_PLACE,
        "        stage = final\n        try:\n            manifest = self._fill_stage(snapshot, stage)\n",
        "F070",
    ),
    _plant(
        "files are not synced", "worker/storage", "                DISK.fsync(self._file)\n", "                self._file.flush()\n", "F071"
    ),
    _plant(
        "digests are not compared",
        "manifest",
        "if digests and digest_file(path) != entry:",
        "if digests and digest_file(path) is None:",
        "F072",
        "F073",
        "F076",
    ),
    _plant("a missing file is no damage", "manifest", '            return f"{shown}: missing"', "            return None", "F074"),
    _plant(
        "kind and step of a manifest are not read",
        "run_dir",
        'if manifest.kind != CHECKPOINT_KIND or manifest.facts.get("step") != step:',
        "if step is None:",
        "F077",
        "F082",
    ),
    _plant("links are followed", "manifest", "        if path.is_symlink():\n            return True\n", "", "F080"),
    _plant(
        "files that came later are damage",
        "run_dir",
        "    bad = damage(path, manifest, digests=digests)\n",
        '    bad = damage(path, manifest, digests=digests) + [str(one) for one in path.rglob("*~")]\n',
        "F075",
    ),
    _plant(
        "each rank decides for itself",
        "worker/resume",
        "for found in gather(damage(chosen.path, part, digests=digests))",
        "for found in [damage(chosen.path, part, digests=digests)]",
        "F078",
    ),
    _plant(
        "rotation deletes in place",
        "worker/rotation",
        "        DISK.rename(old.path, hidden)\n        DISK.fsync_dir(run.path)\n        DISK.rmtree(hidden)\n",
        "        DISK.rmtree(old.path)\n",
        "F083",
    ),
    _plant(
        "whatever is hidden is a leftover", "worker/rotation", 'run.path.glob(f".checkpoint-*{STAGE_MARK}*")', 'run.path.glob(".*")', "F089"
    ),
    _plant(
        "only a checkpoint that can be written to is one",
        "run_dir",
        "or path.is_symlink() or not path.is_dir():",
        "or path.is_symlink() or not path.is_dir() or not path.stat().st_mode & 0o200 or path.parent.name[0] == 'o':",
        "F090",
    ),
    _plant(
        "a full disk is not told",
        "worker/storage",
        "            self.refused = error\n            raise\n",
        "            self.refused = error\n            return view.nbytes\n",
        "F053",
    ),
    _plant(
        "a failed save leaves its stage",
        "worker/checkpoint",
        "            if dist.get_rank() == 0:\n                shutil.rmtree(stage, ignore_errors=True)\n            raise\n",
        "            raise\n",
        "F056",
    ),
    _plant(
        "every save keeps a file open",
        "worker/checkpoint",
        "        snapshot = self._snapshot(step, trainer, own)\n",
        '        snapshot = self._snapshot(step, trainer, own)\n        self.__dict__.setdefault("kept", []).append(open("/dev/null"))\n',
        "F088",
    ),
    _plant(
        "the last save may fail",
        "worker/setup",
        "        if failures[-1].error is not None:\n            raise failures[-1].error\n",
        "",
        "F065",
    ),
    # resume
    _plant(
        "generators start anew",
        "worker/resume",
        '        live_state.set_rng_state(state["rng"], device_type)\n',
        '        assert state["rng"]\n',
        "F091",
        "F042",
        "F092",
        "F094",
        "F095",
        "F097",
        "F100",
        "F043",
        "F064",
        by=(
            "faults/test_train.py::stopped_and_resumed_at_any_step_is_as_if_never_stopped[3]",
            "faults/test_train.py::rank_killed_in_any_phase_ends_the_others_and_the_run_comes_back[1-forward-8]",
            "faults/test_train.py::recomputation_with_dropout_draws_the_same_masks_after_a_resume",
            "faults/test_train.py::five_crashes_in_a_row_lose_nothing",
            "faults/test_train.py::all_ranks_killed_at_once_come_back",
            "faults/test_train.py::signal_at_a_file_operation_of_a_save_is_obeyed_after_it[60]",
        ),
    ),
    _plant(
        "the optimizer starts anew",
        "worker/resume",
        "    live_state.load_optimizer(live, Path(checkpoint))\n",
        "    assert checkpoint\n",
        "F086",
        "F095",
    ),
    _plant(
        "the schedule starts anew",
        "worker/resume",
        "    scheduler.last_epoch = step\n",
        "    scheduler.last_epoch = 0\n    step = 0\n",
        "F098",
        "F091",
    ),
    _plant(
        "all ranks take all the sums",
        "worker/resume",
        '"sums": sums if dist.get_rank() == 0 else [0.0] * len(sums)}',
        '"sums": sums}',
        "F093",
    ),
    _plant(
        "all ranks draw the same",
        "worker/state",
        "(seed * 1_000_003 + step * 8191 + dist.get_rank())",
        "(seed * 1_000_003 + step * 8191)",
        "F096",
    ),
    _plant("metrics are cut a step late", "worker/metrics", "step <= (resume_step or 0) and", "step <= (resume_step or 0) + 1 and", "F099"),
    _plant(
        "evaluation draws from the training's generator",
        "worker/evaluate",
        "    with torch.random.fork_rng(devices=[]):\n",
        "    if True:\n",
        "F091",
        "F064",
        by=(
            "faults/test_train.py::stopped_and_resumed_at_any_step_is_as_if_never_stopped[3]",
            "faults/test_train.py::signal_at_a_file_operation_of_a_save_is_obeyed_after_it[60]",
        ),
    ),
    _plant(
        "newest is by time",
        "run_dir",
        "sorted(complete, key=lambda c: -c.step)",
        "sorted(complete, key=lambda c: -c.path.stat().st_mtime)",
        "F057",
    ),
    _plant(
        "checkpoints of other models load",
        "worker/state",
        "    if problems:\n        more",
        "    if not problems and problems:\n        more",
        "F084",
    ),
    # signals and supervision
    _plant(
        "each rank stops by its own wish",
        "worker/agree",
        "            answer = int(self._tensor.item())\n",
        "            answer = mine\n",
        "F061",
        "F068",
        by=(
            "parity/test_resume.py::signal_to_one_rank_saves_on_all_at_one_step_and_the_curve_goes_on",
            "faults/test_train.py::signal_at_the_last_steps_loses_no_final_checkpoint[10]",
        ),
    ),
    _plant(
        "no process is on a leash",
        "launch/leash",
        "    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:\n",
        "    if libc.prctl(PR_SET_PDEATHSIG, 0) != 0:\n",
        "F066",
    ),
    _plant("a second signal within a moment is a second wish", "worker/signals", "ECHO_SECONDS = 2.0", "ECHO_SECONDS = 0.0", "F063"),
    _plant(
        "a tracker may end the run",
        "worker/trackers",
        "            except Exception as error:",
        "            except ZeroDivisionError as error:",
        "F069",
    ),
    # numbers
    _plant(
        "numbers that are none are used",
        "worker/gradients",
        "        if not bool(torch.isfinite(norm)):\n",
        "        if bool(torch.isinf(norm)) and bool(torch.isnan(norm)):\n",
        "F049",
        "F050",
    ),
    _plant(
        "a step without targets has loss 0", "worker/trainer", "        if total.item() == 0:\n", "        if total.item() < 0:\n", "F021"
    ),
    _plant(
        "out of memory is a failure like others",
        "worker/memory",
        "    return isinstance(error, MemoryError) or",
        "    return isinstance(error, ZeroDivisionError) or",
        "F047",
    ),
    _plant(
        "a full device is a failure like others",
        "worker/memory",
        "    return isinstance(error, torch.OutOfMemoryError) or",
        "    return isinstance(error, ZeroDivisionError) or",
        "F048",
    ),
    _plant(
        "the run directory is made again",
        "worker/metrics",
        "        if self._file is not None:\n            self._append(",
        "        if self._file is not None:\n            self._path.parent.mkdir(exist_ok=True)\n            self._path.parent.joinpath('x').touch()\n            self._append(",
        "F055",
    ),
    # recipe
    _plant(
        "two documents are one",
        "recipe/yaml_tree",
        "                if self._documents > 1:\n",
        "                if self._documents > 2:\n",
        "F001",
    ),
    _plant(
        "the last of two keys wins",
        "recipe/yaml_tree",
        "        if first is entry:\n            return\n        later",
        "        if first is not None:\n            return\n        later",
        "F002",
        "F003",
    ),
    _plant("1e400 is a number", "recipe/scalars", "    if not math.isfinite(value):\n", "    if math.isnan(value):\n", "F004"),
    _plant(
        "the recipe may be fifty times as large",
        "recipe/yaml_tree",
        "        if self._nodes > MAX_NODES:\n",
        "        if self._nodes > 50 * MAX_NODES:\n",
        "F005",
    ),
    _plant(
        "nesting has no limit",
        "recipe/yaml_tree",
        "        if len(self._frames) >= MAX_DEPTH:\n",
        "        if len(self._frames) >= 10**9:\n",
        "F006",
    ),
    _plant(
        "tags are taken",
        "recipe/yaml_tree",
        "        if (tag := event.tag) is not None:\n",
        '        if (tag := event.tag) is not None and "python" not in tag:\n',
        "F007",
    ),
    _plant(
        "pipes are opened and waited for",
        "recipe/yaml_text",
        "        if not stat.S_ISREG(facts.st_mode):\n",
        "        if stat.S_ISDIR(facts.st_mode):\n",
        "F008",
    ),
    _plant(
        "a key may be set twice",
        "recipe/overrides",
        "            if (earlier := _overlap(path, taken)) is not None:\n",
        "            if (earlier := _overlap(path, taken)) is not None and not path:\n",
        "F009",
    ),
    # data
    _plant(
        "lines are counted from 0",
        "data/readers",
        '            yield number, raw.decode("utf-8")\n',
        '            yield number - 1, raw.decode("utf-8")\n',
        "F012",
    ),
    _plant("a byte order mark is text", "data/readers", "        file.read(len(UTF8_BOM))\n", "        pass\n", "F013"),
    _plant("half surrogate pairs are text", "data/json_rows", '    if "\\\\u" in text and', '    if "\\\\U" in text and', "F014"),
    _plant(
        "a key may stand twice in a row", "data/json_rows", "    if len(row) != len(pairs):\n", "    if len(row) > len(pairs):\n", "F015"
    ),
    _plant(
        "rows have no limit",
        "data/readers",
        "        if len(raw) > MAX_ROW_BYTES:\n",
        "        if len(raw) > MAX_ROW_BYTES**4:\n",
        "F017",
        "F020",
    ),
    _plant(
        "CSV fields are matched as far as they go",
        "data/readers",
        "    if len(fields) != len(header):\n",
        "    if len(fields) == 0:\n",
        "F018",
    ),
    _plant("a directory is made in place", "atomic", "    stage = stage_path(final)\n", "    stage = final\n", "F029", "F102"),
    _plant(
        "data may change while they are read",
        "data/build",
        '        raise usage_error("data-changing"',
        '        usage_error("data-changing"',
        "F028",
    ),
    _plant("too few rows are enough", "data/prepare", "    if rows < wanted:\n", "    if rows < 1:\n", "F019"),
    # launch
    _plant(
        "variables of another job stay",
        "launch/environment",
        "{name: value for name, value in environment.items() if name not in removed}, removed",
        "dict(environment), removed",
        "F034",
    ),
    _plant("a lock is followed through a link", "launch/lock", "os.O_CLOEXEC | os.O_NOFOLLOW", "os.O_CLOEXEC", "F123"),
    _plant(
        "a lock is only a file",
        "launch/lock",
        "            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)\n",
        "F038",
        "F079",
    ),
    _plant(
        "a device named twice is one",
        "bridge/devices",
        "        if device in chosen:\n",
        "        if device in chosen and not word:\n",
        "F035",
    ),
    # secrets and code
    _plant("metadata is unpickled as it is", "worker/storage", "_MetadataUnpickler(file).load()", "pickle.load(file)", "F114", "F115"),
    _plant(
        "states of ranks may run code",
        "worker/resume",
        "        state = torch.load(Path(checkpoint) / live_state.rank_file(dist.get_rank()), weights_only=True)\n",
        "        state = torch.load(Path(checkpoint) / live_state.rank_file(dist.get_rank()), weights_only=False)\n",
        "F114",
    ),
    _plant("paths may lead out", "manifest", 'and not name.startswith("/") and ".." not in name.split("/")', "", "F116"),
    _plant(
        "tokens are written as they are",
        "launch/environment",
        "    return MASK if is_secret(name) else mask_text(value)\n",
        "    return value\n",
        "F120",
    ),
    _plant(
        "terminal escapes are obeyed",
        "cli/output",
        'if char in "\\n\\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs")',
        "if char",
        "F124",
    ),
    # merge
    _plant(
        "a merge does not compare digests",
        "merge/integrity",
        "if _entry(path, found) != self._expected[path]]",
        "if _entry(path, found) is None]",
        "F104",
    ),
    _plant(
        "holes in a file are skipped",
        "merge/safetensors_file",
        "        if entry.first_byte != at:\n",
        "        if entry.first_byte < 0:\n",
        "F117",
    ),
    _plant("a merge fills a disk that is full", "merge/output", "    if free_bytes < needed_bytes:\n", "    if free_bytes < 0:\n", "F103"),
    _plant(
        "numbers that are none are merged",
        "merge/values",
        "        return int(magnitudes.max(initial=0)) <= _LARGEST_FINITE_BITS[name]\n",
        "        return True\n",
        "F106",
    ),
    _plant(
        "values are cut instead of rounded",
        "merge/values",
        "        narrow = values.dtype == np.float64 and target.dtype.itemsize == 2\n",
        "        values = np.trunc(values * 64) / 64\n        narrow = values.dtype == np.float64 and target.dtype.itemsize == 2\n",
        "F113",
    ),
    _plant(
        "an output that exists is replaced",
        "merge/output",
        "    if not overwrite:\n",
        "    if overwrite and not target.exists():\n",
        "F109",
    ),
    # what is supervised
    _plant(
        "ranks need not be alike",
        "worker/same",
        "        if other[name] != first[name]\n",
        "        if other[name] != other[name]\n",
        "F032",
    ),
    _plant("the loader's processes take a stop for theirs", "worker/dataset", "        worker_init_fn=ignore_stop_signals,\n", "", "F062"),
    _plant(
        "nothing is started again",
        "launch/restart",
        "    return ended.problem is not None and not signals and",
        "    return ended.problem is None and not signals and",
        "F041",
    ),
    _plant(
        "what fails each time is started again",
        "launch/restart",
        "    if stalled >= SAME_STEP_FAILURES and len(",
        "    if stalled >= 10**6 and len(",
        "F101",
    ),
    _plant(
        "a stopped rank is not late",
        "launch/hang",
        "    if held:\n        return held\n",
        "    if held:\n        return []\n",
        "F037",
        "F044",
    ),
    _plant(
        "collectives are not counted",
        "launch/hang",
        "        return late if len(late) < len(standings) else []\n",
        "        return []\n",
        "F046",
    ),
    _plant(
        "bytes moved are no progress",
        "worker/heartbeat",
        "        if self._phase not in FILE_PHASES:\n",
        "        if self._phase is not None:\n",
        "F087",
    ),
    _plant(
        "a terminal that goes away ends the run",
        "cli/output",
        "        if error.errno not in (errno.EPIPE, errno.EIO):\n",
        "        if error.errno:\n",
        "F060",
    ),
    _plant(
        "a current directory that is gone is a bug",
        "cli/output",
        "isinstance(error, FileNotFoundError) and error.filename is None",
        'isinstance(error, FileNotFoundError) and error.filename == ""',
        "F039",
    ),
    _plant(
        "a recipe of another version is a bug",
        "launch/resume",
        "    except (OSError, ValueError) as error:\n",
        "    except OSError as error:\n",
        "F085",
    ),
    # more of recipe, data, merge, security
    _plant("a global batch may be rounded", "recipe/world", "    if wanted % at_once:\n", "    if wanted < at_once:\n", "F010"),
    _plant(
        "a home that is not expanded is a name",
        "recipe/paths",
        "    return resolved, [_finding(message, hint) for message, hint in _objections(recipe, resolved, cwd)]\n",
        "    return resolved, [_finding(message, hint) for message, hint in _objections(recipe, resolved, cwd)][1:]\n",
        "F011",
    ),
    _plant(
        "a column that is missing is empty",
        "data/formats",
        '        raise RowError(f"it has no column `{column}`")\n',
        '        return ""\n',
        "F016",
    ),
    _plant(
        "an empty completion is trained",
        "data/formats",
        '            raise RowError("the completion is empty")\n',
        "            pass\n",
        "F022",
    ),
    _plant(
        "a tokenizer may be larger than the embedding",
        "bridge/model_files",
        "    if vocabulary_size > rows and not may_grow:\n",
        "    if vocabulary_size > rows and may_grow:\n",
        "F024",
    ),
    _plant(
        "a template may change its mind",
        "data/chat",
        "        if check_repeat and rendering.whole != ",
        "        if not check_repeat and rendering.whole != ",
        "F025",
    ),
    _plant(
        "a port that is taken is tried",
        "launch/accelerate",
        '            probe.bind(("", port))\n',
        '            probe.bind(("", 0))\n',
        "F030",
    ),
    _plant("the user's own accelerate config is read", "launch/accelerate", '        "--config_file": run.accelerate_yaml,\n', "", "F033"),
    _plant(
        "another Python runs the launcher",
        "launch/accelerate",
        '    return (sys.executable, "-m", LAUNCHER_MODULE',
        '    return ("python3", "-m", LAUNCHER_MODULE',
        "F040",
    ),
    _plant(
        "files are for their owner alone",
        "atomic",
        "        return open(path, mode)\n",
        "        file = open(path, mode)\n        os.chmod(path, 0o600)\n        return file\n",
        "F111",
    ),
    _plant(
        "a stranger's recipe may run code",
        "cli/options",
        "    if recipe.model.trust_remote_code and not trust_remote_code:\n",
        "    if trust_remote_code and not recipe.model.trust_remote_code:\n",
        "F118",
    ),
    _plant(
        "a tied head is written twice",
        "merge/ties",
        "    return Tied(ties, {KEY: True} if ties else {})\n",
        "    return Tied({}, {KEY: True} if ties else {})\n",
        "F107",
    ),
    _plant("a limit on file sizes is a bug", "merge/output", "    errno.EFBIG,\n", "", "F052", "F103"),
    # data that is padded, what strangers send
    _plant(
        "what equals the padding is not trained",
        "data/collate",
        "        labels[at, : len(row.labels)] = row.labels\n",
        "        labels[at, : len(row.labels)] = np.where(np.equal(row.input_ids, pad_token_id), IGNORE_INDEX, row.labels)\n",
        "F023",
    ),
    _plant(
        "a closed port is a hub",
        "data/hub",
        "    except OSError:\n        return False\n    return True\n",
        "    except OSError:\n        return True\n    return True\n",
        "F026",
    ),
    _plant(
        "a hub that is busy is one that cannot be reached",
        "bridge/tokenizer",
        "    if directory is None and (answered := _answered(error, name, causes)) is not None:\n",
        "    if directory is not None and (answered := _answered(error, name, causes)) is not None:\n",
        "F027",
    ),
    _plant(
        "templates are rendered outside the sandbox",
        "bridge/tokenizer",
        "        rendered = self.tokenizer.apply_chat_template(\n            messages, tools=tools, chat_template=template, add_generation_prompt=generation_prompt, tokenize=False, **variables\n        )\n",
        "        import jinja2\n\n        rendered = jinja2.Template(template).render(messages=messages, tools=tools, add_generation_prompt=generation_prompt)\n",
        "F119",
    ),
    _plant(
        "machines that are missing are not named",
        "launch/machines",
        "        if self._machine != 0 or not absent:\n",
        "        if self._machine == 0 or not absent:\n",
        "F031",
    ),
    _plant(
        "the launcher's own traceback is shown",
        "launch/verdict",
        '    start = text.find("Traceback (most recent call last)")\n',
        '    start = text.rfind("Traceback (most recent call last)")\n',
        "F036",
    ),
    _plant(
        "the quickest rank is called slow",
        "worker/progress",
        "    rank = max(range(len(working_seconds)), key",
        "    rank = min(range(len(working_seconds)), key",
        "F045",
    ),
    _plant(
        "a row that cannot be read has no name",
        "worker/dataset",
        "            return self.store[index]\n        except Exception as error:",
        "            return self.store[index]\n        except ZeroDivisionError as error:",
        "F051",
    ),
    _plant(
        "a disk that refuses metrics is told at the end",
        "worker/callbacks",
        "if trainer.parts.metrics.failure is None else SAVE_AND_FAIL)",
        "if trainer.parts.metrics.failure is None else self._wish.code())",
        "F054",
    ),
    _plant(
        "the agent gives ranks half a minute to save",
        "launch/accelerate",
        "AGENT_SHUTDOWN_SECONDS = 3600\n",
        "AGENT_SHUTDOWN_SECONDS = 30\n",
        "F058",
    ),
    _plant(
        "the agent does not pass on Slurm's signal",
        "launch/accelerate",
        '"SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"',
        '"SIGTERM,SIGINT,SIGHUP,SIGQUIT"',
        "F059",
    ),
    _plant(
        "a rank that has said its last word is waited for",
        "launch/supervise",
        "        kill_for_good(watch.lingering(LINGER_SECONDS))\n",
        "",
        "F067",
    ),
    _plant(
        "the ranks' files are counted by a listing",
        "worker/resume",
        "    return sorted(fnmatch.filter(manifest.files if manifest else (), live_state.RANK_FILES))\n",
        "    assert fnmatch and manifest\n    return sorted(path.name for path in Path(checkpoint).glob(live_state.RANK_FILES))\n",
        "F081",
    ),
    _plant(
        "shards of a checkpoint are not looked for",
        "merge/weights",
        "    if shards.is_dir() or folder.name == SHARD_FOLDER:\n",
        "    if folder.name == SHARD_FOLDER:\n",
        "F105",
    ),
    _plant(
        "a buffer holds a whole tensor",
        "merge/gather",
        "BUFFER_BYTES = 512 << 10 ",
        "BUFFER_BYTES = 512 << 20 ",
        "F108",
    ),
    _plant(
        "files are opened when they are read",
        "merge/reader",
        "is_vouched: bool = False, limit: int = 256)",
        "is_vouched: bool = False, limit: int = 2)",
        "F110",
    ),
    _plant(
        "an adapter is added unscaled",
        "merge/lora",
        "    scaling = config.scaling(module, rank)\n",
        "    scaling = 1.0 + 0.0 * config.scaling(module, rank)\n",
        "F112",
    ),
    _plant(
        "a manifest does not vouch for itself",
        "manifest",
        '            if raw.pop("digest") != _digest_of(raw):\n',
        '            if not raw.pop("digest"):\n',
        "F077",
    ),
    _plant(
        "a tracker is waited for",
        "worker/trackers",
        "self._answers.get(timeout=self._limit_seconds)",
        "self._answers.get(timeout=None)",
        "F069",
    ),
    _plant(
        "a rank does not wait for what it cannot see yet",
        "worker/resume",
        "    while time.monotonic() < deadline and not",
        "    while time.monotonic() > deadline and not",
        "F081",
    ),
)
