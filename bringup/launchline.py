"""Reading a pasted launch line (shell text, a script, a docker or tmux command): engine, flags, environment.

Nothing is executed. The text may come from a web page: continuation lines, comments after a backslash, curly
quotes, redirections and wrappers are understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bringup.errors import Problem, UsageError

DEPTH_LIMIT = 4
"""How many shells inside shells (tmux '... bash -c "..."') are opened."""
TEXT_LIMIT = 64 * 1024
"""Longest text that is read; a launch line is a few hundred characters."""

_CURLY: dict[str, str | int | None] = {"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "‚": "'"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_OPERATOR = re.compile(r"\d?(?:>>|>&|&>|>\||<<<|<<|<>|>|<)(?:&\d)?|&&|\|\||\|&|[|&;\n()]")
_REDIRECTIONS = "<>"
_CONTINUED = re.compile(r"\\[ \t]*(?:#[^\n]*)?\r?(?:\n|$)")
_FLATTENED = re.compile(r"\\[ \t]+(?:#.*?(?=[ \t]-|$))?(?=[-#]|$|[ \t]-)|\\$")
"""A backslash that ends a line; and the same where a web page has lost the line breaks, comments included."""

_MODULES = {
    "sglang.launch_server": "sglang",
    "sglang.srt.entrypoints.http_server": "sglang",
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "llama_cpp.server": "llama-server",
    "bringup.node.serve": "",
}
_COMMANDS = {
    "sglang": "sglang",
    "vllm": "vllm",
    "llama-server": "llama-server",
    "llama_serve": "llama-server",
}
_IMAGES = (
    (re.compile(r"vllm"), "vllm"),
    (re.compile(r"sglang"), "sglang"),
    (re.compile(r"llama[.-]?cpp"), "llama-server"),
)
_VERSION = re.compile(r"v?(\d+\.\d+\.\d+(?:\.post\d+)?)")
_SHELLS = ("bash", "sh", "zsh", "dash")
_DOCKER = ("docker", "podman", "nerdctl")
_DOCKER_SWITCHES = re.compile(
    r"-[ditP]+|--(?:detach|interactive|tty|rm|privileged|init|read-only|no-healthcheck|publish-all)"
)
"""Options of `docker run` without a value; every other one takes the next word unless it has "="."""


@dataclass(frozen=True)
class LaunchLine:
    """One launch, taken apart. `engine` and `version` are None when the text does not say.

    `argv`: the flags, without program, module and positional model. `complete`: a program was named, so the
    line is a whole launch, not a list of flags. `wrappers`: what runs it (nohup ...). `curly`: typographic
    quotes were read as plain ones.
    """

    engine: str | None
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    program: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    image: str | None = None
    version: str | None = None
    complete: bool = False
    curly: bool = False


@dataclass(slots=True)
class _Word:
    text: str
    literal: bool
    """In single quotes, so that a shell would not expand variables in it."""
    quoted: bool


def parse(line: str | Sequence[str]) -> LaunchLine:
    """A launch from shell text, or from words that a shell has already split.

    Raises UsageError for an unclosed quote, for text without any flag or engine, and for text too long.
    """
    if not isinstance(line, str):
        words = [_Word(word, True, False) for word in line]
        found = _launch(words, {}, 0)
        if found is None and len(words) == 1:
            return parse(words[0].text)
        return found or _bare(words, {})
    if len(line) > TEXT_LIMIT:
        raise UsageError(Problem("launch line", f"is longer than {TEXT_LIMIT} characters"))
    return _script(line, 0)


def _script(text: str, depth: int) -> LaunchLine:
    plain = text.translate(str.maketrans(_CURLY))
    curly = plain != text
    exported: dict[str, str] = {}
    commands = _commands(plain)
    candidates: list[LaunchLine] = []
    for words in commands:
        found = _launch(words, exported, depth)
        if found is not None:
            candidates.append(found)
        exported.update(_exports(words))
    if not candidates:
        flags = [words for words in commands if words and words[0].text.startswith("-")]
        if not flags:
            raise UsageError(
                Problem(
                    "launch line",
                    "holds no engine and no flags",
                    "Paste the command that starts the server, or only its flags.",
                )
            )
        candidates = [_bare([word for words in flags for word in words], exported)]
    best = candidates[0]
    return replace(best, curly=True) if curly else best


def _bare(words: Iterable[_Word], env: Mapping[str, str]) -> LaunchLine:
    """Flags without a program, with assignments before them if any."""
    rest = list(words)
    own = dict(env)
    while rest and _is_assignment(rest[0]):
        name, _, value = rest.pop(0).text.partition("=")
        own[name] = value
    model, argv = _positional([_expand(word, own) for word in rest])
    return LaunchLine(engine=None, argv=tuple(argv), env=own, model=model or model_flag(argv))


def _exports(words: list[_Word]) -> dict[str, str]:
    """What `export A=1`, `A=1` on a line of its own, or `set -a` style lines give to later commands."""
    texts = [word.text for word in words]
    if texts[:1] == ["export"]:
        texts = texts[1:]
    if not texts or not all(_ASSIGNMENT.match(text) for text in texts):
        return {}
    return dict(text.split("=", 1) for text in texts)


def _is_assignment(word: _Word) -> bool:
    return bool(_ASSIGNMENT.match(word.text))


# Words -----------------------------------------------------------------------------------------------


def _commands(text: str) -> list[list[_Word]]:
    """Simple commands of a shell text: split at operators, redirections and comments dropped."""
    commands: list[list[_Word]] = [[]]
    position = 0
    flat = "\n" not in text.strip()
    while position < len(text):
        char = text[position]
        if char == "\\" and (found := (_FLATTENED if flat else _CONTINUED).match(text, position)):
            position = found.end()
        elif char in " \t\r":
            position += 1
        elif char == "#":
            position = _end_of_line(text, position)
        elif operator := _OPERATOR.match(text, position):
            position = operator.end()
            if operator[0].lstrip("0123456789&")[:1] in tuple(_REDIRECTIONS):
                position = _skip_target(text, position, operator[0])
            elif commands[-1]:
                commands.append([])
        else:
            word, position = _word(text, position)
            commands[-1].append(word)
    return [words for words in commands if words]


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _skip_target(text: str, position: int, operator: str) -> int:
    """Past the file of a redirection; `2>&1` has none."""
    if re.search(r"&\d$", operator):
        return position
    while position < len(text) and text[position] in " \t":
        position += 1
    if position >= len(text) or text[position] in "\n|;&":
        return position
    return _word(text, position)[1]


def _word(text: str, position: int) -> tuple[_Word, int]:
    """One shell word from `position`: quotes, escapes and dollar forms joined."""
    out: list[str] = []
    literal = quoted = False
    while position < len(text):
        char = text[position]
        if char in " \t\r\n" or char in "|&;()<>":
            break
        if char == "'":
            piece, position = _until(text, position, "'")
            out.append(piece)
            literal = quoted = True
        elif char == '"':
            piece, position = _double(text, position)
            out.append(piece)
            quoted = True
        elif char == "\\":
            follows = text[position + 1 : position + 2]
            if follows in ("\n", "") or re.match(r"\\\r?\n", text[position:]):
                position = _end_of_line(text, position) + 1
                continue
            out.append(follows)
            position += 2
        elif char == "$" and text[position : position + 2] in ("$(", "${"):
            piece, position = _substitution(text, position)
            out.append(piece)
        else:
            out.append(char)
            position += 1
    return _Word("".join(out), literal, quoted), position


def _until(text: str, position: int, quote: str) -> tuple[str, int]:
    end = text.find(quote, position + 1)
    if end < 0:
        raise UsageError(
            Problem(
                "launch line", f"the quote {quote} at character {position + 1} is never closed", "Close it."
            )
        )
    return text[position + 1 : end], end + 1


def _double(text: str, position: int) -> tuple[str, int]:
    out: list[str] = []
    start = position
    position += 1
    while position < len(text) and text[position] != '"':
        if text[position] == "\\" and text[position + 1 : position + 2] in ('"', "\\", "$", "`", "\n"):
            if text[position + 1] != "\n":
                out.append(text[position + 1])
            position += 2
            continue
        out.append(text[position])
        position += 1
    if position >= len(text):
        raise UsageError(
            Problem("launch line", f'the quote " at character {start + 1} is never closed', "Close it.")
        )
    return "".join(out), position + 1


def _substitution(text: str, position: int) -> tuple[str, int]:
    """`$(...)` or `${...}` kept as it is: its value is not known here."""
    closing = {"(": ")", "{": "}"}[text[position + 1]]
    depth, start = 0, position
    position += 1
    while position < len(text):
        if text[position] == text[start + 1]:
            depth += 1
        elif text[position] == closing:
            depth -= 1
            if not depth:
                return text[start : position + 1], position + 1
        position += 1
    raise UsageError(
        Problem("launch line", f'"{text[start : start + 2]}" at character {start + 1} is never closed')
    )


def _expand(word: _Word, env: Mapping[str, str]) -> str:
    """A word with the variables that the text itself sets; others stay as written."""
    if word.literal or "$" not in word.text:
        return word.text

    def replaced(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        fallback: str | None = found[2]
        value = env.get(name, fallback)
        return found[0] if value is None else value

    return _VARIABLE.sub(replaced, word.text)


# Programs --------------------------------------------------------------------------------------------


def _launch(words: list[_Word], env: Mapping[str, str], depth: int) -> LaunchLine | None:
    """The launch in a simple command, or None when it starts no engine."""
    if not words:
        return None
    if words[0].text.startswith("ExecStart="):
        words = [_Word(words[0].text.removeprefix("ExecStart=").lstrip("-@:+!"), False, False), *words[1:]]
    own, start = _leading(words, env)
    docker = _docker(words, start, own, depth)
    if docker is not None:
        return docker
    inner = _nested(words, depth)
    if inner is not None:
        return replace(inner, env={**own, **inner.env})
    for position in range(start, len(words)):
        entry = _entry(words, position)
        if entry is not None:
            engine, after = entry
            return _line(words, start, position, after, engine, own)
    return None


def _leading(words: list[_Word], env: Mapping[str, str]) -> tuple[dict[str, str], int]:
    """Assignments before the program (also after `env`), and where the program starts."""
    own = dict(env)
    position = 0
    while position < len(words):
        word = words[position]
        if _is_assignment(word):
            name, _, value = word.text.partition("=")
            own[name] = _expand(_Word(value, word.literal, word.quoted), own)
        elif word.text not in ("env", "exec", "export") or word.quoted:
            break
        position += 1
    return own, position


def _entry(words: list[_Word], position: int) -> tuple[str, int] | None:
    """(engine, index after the program) when an engine's program stands at `position`."""
    text = words[position].text
    name = text.rsplit("/", 1)[-1]
    if text == "-m" and position + 1 < len(words) and words[position + 1].text in _MODULES:
        return _MODULES[words[position + 1].text], position + 2
    if name.endswith(".py"):
        engine = _COMMANDS.get(name.removesuffix(".py"))
        if engine is None and name == "launch_server.py":
            engine = "sglang"
        return (engine, position + 1) if engine else None
    engine = _COMMANDS.get(name)
    if engine is None:
        return None
    if engine == "llama-server":
        return engine, position + 1
    follows = words[position + 1].text if position + 1 < len(words) else ""
    return (engine, position + 2) if follows == "serve" else None


def _line(
    words: list[_Word], start: int, entry: int, after: int, engine: str, env: dict[str, str]
) -> LaunchLine:
    before = words[start:entry]
    own = dict(env)
    for word in before:
        if _is_assignment(word):
            name, _, value = word.text.partition("=")
            own[name] = value
    rest = [_expand(word, own) for word in words[after:]]
    model, argv = _positional(rest)
    program = [word.text for word in words[entry:after]]
    wrappers = [word.text for word in before if not _is_assignment(word)]
    if wrappers and re.match(r"python[\d.]*$", wrappers[-1].rsplit("/", 1)[-1]):
        program = [wrappers.pop(), *program]
    return LaunchLine(
        engine=engine or None,
        argv=tuple(argv),
        env=own,
        model=model or model_flag(argv),
        program=tuple(program),
        wrappers=tuple(wrappers),
        complete=True,
    )


def _positional(words: list[str]) -> tuple[str | None, list[str]]:
    if words and not words[0].startswith("-"):
        return words[0], words[1:]
    return None, words


def model_flag(argv: Sequence[str]) -> str | None:
    """The value of the flag that names the model, if there is one."""
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in ("--model-path", "--model", "-m"):
            return value if equals else next(iter(argv[position + 1 : position + 2]), None)
    return None


def _nested(words: list[_Word], depth: int) -> LaunchLine | None:
    """A launch inside a quoted word: tmux new-session '...', bash -c '...', ssh host '...'."""
    if depth >= DEPTH_LIMIT:
        return None
    shell = any(word.text.rsplit("/", 1)[-1] in _SHELLS for word in words)
    for word in words:
        if not word.quoted or not re.search(r"\s", word.text):
            continue
        if shell or re.search(r"launch_server|vllm|sglang|llama-server", word.text):
            try:
                found = _script(word.text, depth + 1)
            except UsageError:
                continue
            if found.complete:
                return found
    return None


def _docker(words: list[_Word], start: int, env: Mapping[str, str], depth: int) -> LaunchLine | None:
    """`docker run [options] IMAGE [command]`; an image that starts the engine itself takes flags at once."""
    texts = [word.text for word in words]
    if not any(text.rsplit("/", 1)[-1] in _DOCKER for text in texts[start : start + 2]) or "run" not in texts:
        return None
    position = texts.index("run") + 1
    own: dict[str, str] = {}
    entrypoint = ""
    while position < len(words) and texts[position].startswith("-"):
        name, equals, value = texts[position].partition("=")
        takes = not equals and not _DOCKER_SWITCHES.fullmatch(name)
        if takes and position + 1 < len(words):
            value = _expand(words[position + 1], env)
        if name in ("-e", "--env") and "=" in value:
            key, _, setting = value.partition("=")
            own[key] = setting
        if name == "--entrypoint":
            entrypoint = value
        position += 2 if takes else 1
    if position >= len(words):
        return None
    image = texts[position]
    found = _in_container(words[position + 1 :], image, entrypoint, {**env, **own}, depth)
    inside = {**own, **_own(found, env)}
    return replace(found, image=image, version=_image_version(image), env=inside)


def _own(found: LaunchLine, outer: Mapping[str, str]) -> dict[str, str]:
    """The container does not see the shell's own variables."""
    return {name: value for name, value in found.env.items() if name not in outer}


def _in_container(
    words: list[_Word], image: str, entrypoint: str, env: dict[str, str], depth: int
) -> LaunchLine:
    head = [_Word(entrypoint, False, False)] if entrypoint else []
    found = _launch([*head, *words], env, depth)
    if found is not None:
        return found
    engine = next((engine for pattern, engine in _IMAGES if pattern.search(image)), None)
    model, argv = _positional([_expand(word, env) for word in words])
    return LaunchLine(
        engine=engine, argv=tuple(argv), env=env, model=model or model_flag(argv), complete=engine is not None
    )


def _image_version(image: str) -> str | None:
    tag = image.rsplit("/", 1)[-1].partition(":")[2]
    found = _VERSION.match(tag)
    return found[1] if found else None
