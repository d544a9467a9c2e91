"""Limits on response formats, and the helper process that compiles them first: whatever a format is, it is followed or refused by
name, and nothing else is disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from onedraw import limits
from onedraw.errors import BadParameter, BadRequest, QueueFull
from onedraw.llm.request_options import RequestOptions, format_of
from onedraw.text.constraints.format_limits import check_lark, check_schema, schema_text
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.response_format import JsonFormat, LarkFormat, RegexFormat, ReplyFormat
from onedraw.text.fake_tokenizer import fake_tokenizer
from onedraw.text.reply_parser import PLAIN_TEXT
from onedraw.text.tools.dialects import Dialect, Tool
from onedraw.text.tools.grammar import ToolCallGrammar
from tests.fixtures.hostile_formats import CORPUS, STRING, items_chain
from tests.support.helper_process import checking, helper_pid

TOKENIZER = fake_tokenizer()
EOS = 256
ORDINARY = JsonFormat.of({"type": "object", "properties": {"a": {"type": "integer"}}}, "x")
COMPILER = GrammarCompiler(TOKENIZER, (EOS,))


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    """One whose helper process a test may end."""
    made = GrammarCompiler(TOKENIZER, (EOS,))
    yield made
    made.close()


def format_from(options: dict[str, Any]) -> ReplyFormat:
    found = format_of(RequestOptions.of(**options))
    assert found is not None
    return found


def refusal(options: dict[str, Any], compiler: GrammarCompiler = COMPILER) -> BadParameter | None:
    """Why a format is refused; None if it can be followed, for which its first tokens are computed."""
    try:
        constraint = compiler.constraint(format_from(options), PLAIN_TEXT)
        assert constraint.allowed([], ()) is not None
    except BadParameter as error:
        return error
    return None


# ---------------------------------------------------------------------- the corpus of past findings


@pytest.mark.parametrize("number", [3, 300, 3_000, 30_000])
@pytest.mark.parametrize("name", CORPUS)
def test_a_format_is_followed_or_refused_by_name(name: str, number: int) -> None:
    options = CORPUS[name](number)
    error = refusal(options)
    if error is not None:
        (param,) = options
        assert error.param is not None
        assert error.param.split(".")[0] == param


@pytest.mark.parametrize("name", [name for name in CORPUS if "chain" in name])
def test_chains_of_a_few_links_are_accepted(name: str) -> None:
    assert refusal(CORPUS[name](20)) is None or name == "conditional_chain"


def test_nothing_of_the_corpus_reaches_the_compiler_of_the_server_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    checked: list[str] = []
    check, matcher = COMPILER._checker.check, COMPILER._library.LLMatcher

    def note_check(request: Any) -> Any:
        checked.append(request.get("grammar", ""))
        return check(request)

    monkeypatch.setattr(COMPILER._checker, "check", note_check)
    monkeypatch.setattr(
        COMPILER._library,
        "LLMatcher",
        lambda vocabulary, text, **rest: compiled.append(text) or matcher(vocabulary, text, **rest),
    )
    for name, made in CORPUS.items():
        refusal(made(41)), name
    assert compiled
    assert set(compiled) <= set(checked)


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"enum": list(range(limits.MAX_FORMAT_MEMBERS + 1))}, f"{limits.MAX_FORMAT_MEMBERS:,}"),
        ({f"x{i}": i for i in range(limits.MAX_FORMAT_VALUES + 1)}, f"{limits.MAX_FORMAT_VALUES:,} values"),
        ({"x": [{"$ref": "#"} for _ in range(limits.MAX_FORMAT_REFERENCES + 1)]}, f"{limits.MAX_FORMAT_REFERENCES:,} references"),
        (CORPUS["nested_items"](limits.MAX_FORMAT_NESTING)["guided_json"], f"{limits.MAX_FORMAT_NESTING} levels"),
        (CORPUS["nested_items"](200_000)["guided_json"], f"{limits.MAX_FORMAT_NESTING} levels"),
        (items_chain(limits.MAX_FORMAT_DEPTH)["guided_json"], f"{limits.MAX_FORMAT_DEPTH} levels"),
        ({"const": "x" * limits.MAX_FORMAT_CHARACTERS}, f"{limits.MAX_FORMAT_CHARACTERS:,}"),
        (json.dumps({"const": "x" * limits.MAX_FORMAT_CHARACTERS}), f"{limits.MAX_FORMAT_CHARACTERS:,}"),
    ],
)
def test_the_error_of_a_schema_over_a_limit_has_the_limit(schema: Any, words: str) -> None:
    with pytest.raises(BadParameter, match=words) as error:
        JsonFormat.of(schema, "schema")
    assert error.value.param == "schema"


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: a\n" + "\n".join(f'a{i}: "x"' for i in range(limits.MAX_FORMAT_RULES + 1)), f"{limits.MAX_FORMAT_RULES:,}"),
        ("start: " + '"x" ' * (limits.MAX_FORMAT_VALUES + 1), f"{limits.MAX_FORMAT_VALUES:,} symbols"),
        (CORPUS["rule_chain"](limits.MAX_FORMAT_DEPTH)["guided_grammar"], f"{limits.MAX_FORMAT_DEPTH} levels"),
        (CORPUS["grouped_rule_chain"](limits.MAX_FORMAT_DEPTH // 3)["guided_grammar"], f"{limits.MAX_FORMAT_DEPTH} levels"),
        (CORPUS["schema_in_lark"](limits.MAX_FORMAT_DEPTH)["guided_grammar"], f"{limits.MAX_FORMAT_DEPTH} levels"),
        ("start: %json " + "[" * 100_000, "levels deep"),
        ('start: "' + "x" * limits.MAX_FORMAT_CHARACTERS + '"', f"{limits.MAX_FORMAT_CHARACTERS:,}"),
    ],
)
def test_the_error_of_a_grammar_over_a_limit_has_the_limit(grammar: str, words: str) -> None:
    with pytest.raises(BadParameter, match=words) as error:
        check_lark(grammar, "grammar")
    assert error.value.param == "grammar"


def test_references_to_one_value_and_to_themselves_are_followed_once() -> None:
    check_schema({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "anyOf": [{"$ref": "#/$defs/a"}] * 500}, "x")
    check_schema({"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/a"}}}, "x")
    check_schema({"$ref": "#/$defs/a~1b%25/0", "$defs": {"a/b%": [{"type": "string"}]}}, "x")
    check_schema({"anyOf": [{"$ref": text} for text in ("", "#/", "#/x/y", "#/anyOf/99", "other.json#/a", "#name")]}, "x")


COSTLY_TEXTS = {
    "a name without a colon": {"guided_grammar": "start: x\n" + "a" * 262_000},
    "an expression of opening brackets": {"guided_grammar": "start: /" + "[" * 262_000},
    "schemas that never end": {"guided_grammar": "start: " + "%json " * 43_000},
    "a count before white space": {"guided_grammar": 'root ::= "a"{1,' + " " * 262_000},
}
CHECK = """
import json, resource, sys
from onedraw.errors import BadParameter
from onedraw.text.constraints.format_limits import check_lark
from onedraw.text.constraints.gbnf import translate
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
text = json.loads(sys.stdin.read())["guided_grammar"]
try:
    (translate if "::=" in text else check_lark)(text, "guided_grammar")
except BadParameter as error:
    assert error.param == "guided_grammar"
"""


@pytest.mark.parametrize("name", COSTLY_TEXTS)
def test_checking_a_text_takes_work_that_grows_with_its_length(name: str) -> None:
    """Regression: the patterns with which a grammar was read took the square of its length, which is minutes during which
    nothing else ran. The process has a minute of processor time and needs about one second."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK], input=json.dumps(COSTLY_TEXTS[name]), text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0


def test_a_slash_ends_an_expression_also_inside_a_class_as_in_the_compiler() -> None:
    uses = "start: /[/ a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(600)) + '\na600: "x"'
    with pytest.raises(BadParameter, match="levels deep"):
        check_lark(uses, "x")


@pytest.mark.parametrize("text", [r'{"\ud800": 1}', r'{"properties": {"\ud800": {"pattern": "("}}}', r'{"const": "\ud800"}'])
def test_a_schema_as_text_with_half_of_a_surrogate_pair_is_refused(text: str) -> None:
    with pytest.raises(BadParameter, match="surrogate") as error:
        JsonFormat.of(text, "guided_json")
    assert str(error.value).isascii()
    assert JsonFormat.of(r'{"const": "\\ud800 and \ud83d\ude00"}', "guided_json").schema


def test_quoted_text_and_comments_are_no_rules() -> None:
    names = " ".join(f'"a{i}: b{i}"' for i in range(50))
    check_lark(f"start: {names} /a: b/ // c: d\n", "x")


@pytest.mark.parametrize("dialect", ["hermes", "qwen_xml", "laguna", "gemma", "llama", "pythonic"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", [name for name in CORPUS if "guided_json" in CORPUS[name](1)])
def test_the_schema_of_a_tool_is_written_or_refused_by_name(name: str, strict: bool, dialect: Dialect) -> None:
    for number in (3, 40, 120, 450):
        part = CORPUS[name](number)["guided_json"]
        schema = {"type": "object", "properties": {"a": part}, "$defs": part.get("$defs", {})}
        try:
            tool = Tool("f", parameters=schema_text(schema, "tools[0]"), strict=strict, param="tools[0]")
            writer = ToolCallGrammar(dialect, tokenizer=TOKENIZER, lark_text=COMPILER.lark_text, check=COMPILER.check_schema)
            lark = writer.write([tool], required=True, parallel=True)
            COMPILER.constraint(LarkFormat(lark, "tools", numbers=True), PLAIN_TEXT)
        except BadRequest as refused:
            assert (refused.param or "").startswith("tools")  # noqa: PT017


def test_types_that_multiply_are_not_written_without_end() -> None:
    """Two types in each of forty nested schemas are 2^40 rules."""
    part: Any = {"type": "string"}
    for _ in range(40):
        part = {"type": ["array", "array"], "items": part}
    tool = Tool("f", parameters=schema_text({"type": "object", "properties": {"a": part}}, "tools[0]"))
    writer = ToolCallGrammar("pythonic", tokenizer=TOKENIZER, lark_text=COMPILER.lark_text, check=COMPILER.check_schema)
    with pytest.raises(BadRequest, match="too much work") as error:
        writer.write([tool], required=True, parallel=True)
    assert error.value.param == "tools"


def test_the_schemas_of_all_tools_share_the_time_for_checking_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each had the whole time of a format, so a request with 60 costly ones kept others waiting for minutes."""
    monkeypatch.setattr(limits, "TOOL_SECONDS", 0.2)
    asked: list[str] = []

    def check(schema: Any, param: str, spend: Callable[[float], None]) -> Any:
        asked.append(param)
        spend(0.06)
        return schema

    tools = [Tool(f"f{i}", "", '{"type": "object"}', strict=False, param=f"tools[{i}]") for i in range(60)]
    writer = ToolCallGrammar("hermes", tokenizer=TOKENIZER, lark_text=COMPILER.lark_text, check=check)
    with pytest.raises(BadRequest, match=r"0\.2 seconds") as error:
        writer.write(tools, required=True, parallel=True)
    assert error.value.param == "tools"
    assert len(asked) == 4
    spent: list[float] = []
    # The processor time of the helper is known in steps of its clock, so the schema is not a small one.
    new = {"type": "object", "properties": {f"new{i}": {"type": "string", "pattern": "[a-z]{1,30}[0-9]"} for i in range(300)}}
    COMPILER.check_schema(new, "x", spent.append)
    COMPILER.check_schema(new, "x", spent.append)
    assert spent[0] > spent[1] == 0


# ---------------------------------------------------------------------- the helper process


def test_a_stack_overflow_in_the_compiler_is_that_requests_error(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits on depth are lifted, so that only the helper process stands between the schema and the server."""
    compiler.constraint(ORDINARY, PLAIN_TEXT)
    before = helper_pid(compiler)
    for name in ("MAX_FORMAT_DEPTH", "MAX_FORMAT_REFERENCES", "MAX_FORMAT_VALUES"):
        monkeypatch.setattr(limits, name, 10**9)
    error = refusal(items_chain(4_000), compiler)
    assert error is not None
    assert error.param == "guided_json"
    assert "stack" in str(error)
    compiler.constraint(RegexFormat("[ab]", "x"), PLAIN_TEXT)
    assert helper_pid(compiler) != before


def test_a_format_that_takes_too_much_memory_is_refused(compiler: GrammarCompiler) -> None:
    error = refusal(CORPUS["optional_characters"](20_000), compiler)
    assert error is not None
    assert error.param == "guided_regex"
    assert "MiB" in str(error)


def test_a_format_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COMPILE_SECONDS", 0.05)
    made = GrammarCompiler(TOKENIZER, (EOS,))
    error = refusal(CORPUS["many_properties"](2_500), made)
    made.close()
    assert error is not None
    assert error.param == "guided_json"
    assert "0.05 seconds" in str(error)


def test_a_refusal_is_kept_so_that_repeating_it_costs_nothing(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    options = CORPUS["optional_characters"](20_000)
    first = refusal(options, compiler)
    monkeypatch.setattr(compiler._checker, "check", lambda request: pytest.fail("checked again"))
    again = refusal(options, compiler)
    assert str(again) == str(first)
    with pytest.raises(BadParameter, match="MiB") as other:
        compiler.constraint(RegexFormat("a?" * 20_000, "structured_outputs.regex"), PLAIN_TEXT)
    assert other.value.param == "structured_outputs.regex"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_helper_process_that_is_killed_at_work_is_replaced_and_the_format_is_compiled(
    compiler: GrammarCompiler, number: signal.Signals
) -> None:
    """Regression: only of SIGKILL was it known that no format causes it."""
    compiler.constraint(ORDINARY, PLAIN_TEXT)
    pid = helper_pid(compiler)
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, number)

    def go_on() -> None:
        with suppress(ProcessLookupError):  # SIGKILL ended it at once
            os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(0.2, go_on)  # A stopped process gets SIGTERM when it continues.
    timer.start()
    compiler.constraint(RegexFormat(f"killed by {number}", "x"), PLAIN_TEXT)
    timer.join()
    assert helper_pid(compiler) != pid


def test_a_helper_process_that_was_killed_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.constraint(ORDINARY, PLAIN_TEXT)
    killed = helper_pid(compiler)
    os.kill(killed, signal.SIGKILL)
    compiler.constraint(RegexFormat("[ab]", "x"), PLAIN_TEXT)
    assert helper_pid(compiler) != killed


def test_a_format_that_is_being_checked_holds_up_no_format_that_was_compiled_before(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor another one that is new, which has a process of its own; only a third one waits."""
    compiler.constraint(ORDINARY, PLAIN_TEXT)
    monkeypatch.setattr(limits, "COMPILE_WAIT_SECONDS", 0.01)
    stopped, threads, done = [], [], []

    def slow(pattern: str) -> None:
        compiler.constraint(RegexFormat(pattern, "x"), PLAIN_TEXT)
        done.append(pattern)

    try:
        for number in range(limits.MAX_FORMAT_WORK):
            compiler.constraint(RegexFormat(f"new {number}", "x"), PLAIN_TEXT)
            stopped.append(helper_pid(compiler))
            os.kill(stopped[-1], signal.SIGSTOP)
            threads.append(threading.Thread(target=slow, args=(f"slow {number}",)))
            threads[-1].start()
            while checking(compiler) <= number:
                threading.Event().wait(0.01)
        compiler.constraint(ORDINARY, PLAIN_TEXT)
        with pytest.raises(QueueFull, match="being compiled"):
            compiler.constraint(RegexFormat("[ef]", "x"), PLAIN_TEXT)
        assert not done
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        for thread in threads:
            thread.join()
    assert len(set(stopped)) == len(done) == limits.MAX_FORMAT_WORK
    compiler.constraint(RegexFormat("[ef]", "x"), PLAIN_TEXT)


SCRIPT = """
import sys, onedraw
model = onedraw.load("smollm2", backend="fake")
print(model.generate("a", guided_choice=["yes"], max_tokens=20).text, flush=True)
print(model.constraints.grammars._checker._idle[-1]._process.pid, flush=True)
sys.stdin.read() if len(sys.argv) > 1 else model.close()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_the_helper_process_serves_a_plain_script_and_ends_with_it(tmp_path: Path, killed: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, str(script), *(["wait"] if killed else [])]
    environment = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"yes"
        helper = int(process.stdout.readline())
        if killed:
            process.kill()
    assert killed or process.returncode == 0
    while _runs(helper):
        threading.Event().wait(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---------------------------------------------------------------------- random formats

SMALL = st.integers(-3, 40)
LEAVES = st.one_of(
    st.sampled_from([True, False, {}, STRING, {"type": "integer"}, {"type": "objekt"}, {"$ref": "#"}, {"$ref": "#/$defs/a"}]),
    st.builds(lambda low, high: {"type": "string", "minLength": low, "maxLength": high}, SMALL, SMALL),
    st.builds(lambda low, high: {"type": "integer", "minimum": low, "maximum": high}, SMALL, SMALL),
    st.builds(lambda text: {"type": "string", "pattern": text}, st.text("ab(|)*?+[]{}0129^$\\.-", max_size=12)),
    st.builds(lambda values: {"enum": values}, st.lists(st.one_of(st.none(), SMALL, st.text(max_size=3)), max_size=4)),
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, max_size=3)
    named = st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    return st.one_of(
        st.builds(lambda word, parts: {word: parts}, st.sampled_from(["anyOf", "oneOf", "allOf", "prefixItems"]), several),
        st.builds(
            lambda word, part, low: {"type": "array", word: part, "minItems": low},
            st.sampled_from(["items", "contains", "additionalItems"]),
            inner,
            SMALL,
        ),
        st.builds(
            lambda word, parts, required: {"type": "object", word: parts, "required": required},
            st.sampled_from(["properties", "patternProperties", "dependentSchemas"]),
            named,
            st.lists(st.sampled_from("abcd"), max_size=2),
        ),
        st.builds(
            lambda word, part: {word: part}, st.sampled_from(["not", "if", "additionalProperties", "propertyNames"]), inner
        ),
        st.builds(lambda parts, whole: {"$defs": parts, **(whole if isinstance(whole, dict) else {})}, named, inner),
        st.builds(lambda number, part: _deepened(number, part), st.integers(1, 60), inner),
    )


def _deepened(number: int, part: Any) -> Any:
    for _ in range(number):
        part = {"anyOf": [part, {"type": "null"}]}
    return part


SCHEMAS = st.recursive(LEAVES, _larger, max_leaves=12)
PIECES = (
    *("start: a", "\na: b c", "\nb: ", "\nc: ", '"x"', "/[ab]+/", "/(a|b)*c/", "a", "b", "|", "(", ")"),
    *("*", "+", "?", "{2}", "{0,9}"),
    *("%json {}", '%json {"type": "integer"}', "\nA: ", "A", "~", "&", "[max_tokens=3]", '[stop="x"]', '""', " ", "\n"),
    *("//", "@x", "<[7]>"),
    *("root ::= a", "\na ::= b", "\nb ::= ", "[a-z]", "[^\\n]", '"\\x41"', '"\\u00e9"', ".", "#", "::=", "<", "\\", '"', "/"),
)  # fmt: skip
GRAMMARS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=25).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=25).map(lambda pieces: "start: a\na: " + " ".join(pieces)),
    st.lists(st.sampled_from(PIECES), max_size=25).map(lambda pieces: "root ::= a\na ::= " + " ".join(pieces)),
)
MANY = hypothesis_settings(max_examples=150)


@MANY
@given(SCHEMAS)
def test_a_random_schema_is_followed_or_refused_by_name(schema: Any) -> None:
    error = refusal({"guided_json": json.dumps(schema)})
    assert error is None or (error.param or "").split(".")[0].split("[")[0] == "guided_json"


@MANY
@given(GRAMMARS)
def test_a_random_grammar_is_followed_or_refused_by_name(grammar: str) -> None:
    error = refusal({"guided_grammar": grammar})
    assert error is None or error.param == "guided_grammar"


@MANY
@given(st.text("ab(|)*?+[]{}0129^$\\.-&~/é", max_size=20))
def test_a_random_expression_is_followed_or_refused_by_name(pattern: str) -> None:
    error = refusal({"guided_regex": pattern})
    assert error is None or error.param == "guided_regex"


@MANY
@given(st.sampled_from(sorted(CORPUS)), st.integers(1, 300), st.data())
def test_a_damaged_format_of_the_corpus_is_followed_or_refused_by_name(name: str, number: int, data: st.DataObject) -> None:
    ((param, value),) = CORPUS[name](number).items()
    if isinstance(value, list):
        return
    text = value if isinstance(value, str) else json.dumps(value)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 40)))
    text = text[:start] + data.draw(st.sampled_from(["", *PIECES])) + text[stop:]
    error = refusal({param: text})
    assert error is None or (error.param or "").split(".")[0].split("[")[0] == param
