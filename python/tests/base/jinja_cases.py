"""Jinja2 as Hugging Face's `transformers` configures it, and generated templates for it."""

import copy
import functools
import json
import random
from datetime import UTC, datetime

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks text for training; here it only renders its body."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now(UTC).strftime(form)
    return env


ENVIRONMENT = environment()


@functools.lru_cache(maxsize=64)
def compiled(source):
    return ENVIRONMENT.from_string(source)


def reference(source, variables):
    """What Jinja2 renders; `None` if it refuses the template or fails on it."""
    try:
        # Filters of Jinja2 change lists that they are given.
        return compiled(source).render(**copy.deepcopy(variables))
    except Exception:
        return None


# Values that print differently in each run, or show an object of Python.
OBJECTS = (
    "<generator",
    " at 0x",
    "<bound method",
    "<built-in",
    "<Macro",
    "<Namespace",
    "<class",
    "<map",
    "<jinja2",
    "dict_keys(",
    "dict_values(",
    "dict_items(",
    "<LoopContext",
    "<function",
    "<Cycler",
    "Markup(",
)

VARIABLES = {
    "s": "Hello, wörld!\n  two  words\t<b>'q'\"</b>",
    "t": "a,b,,c",
    "form": "<%s|%s>",
    "e": "",
    "blank": "  \n x \t ",
    "n": 7,
    "neg": -3,
    "f": 2.5,
    "big": 1e20,
    "tiny": 0.00001234,
    "long": 98765432109876543210,
    "longs": [-98765432109876543210, 2**64, -(2**63) - 1, 10**40],
    "yes": True,
    "no": False,
    "nil": None,
    "xs": [3, 1, 2, 1],
    "words": ["pear", "Apple", "fig", "apple"],
    "mixed": [1, "two", 3.0, None, True, [1, "x"], {"k": "v"}],
    "empty": [],
    "d": {"form": "%5s%%%-4s;", "b": 1, "a": "x", "items": [1, 2], "keys": None},
    "rows": [
        {"name": "z", "n": 2, "tag": "A", "in": {"x": 1}},
        {"name": "y", "n": 1, "tag": "b", "in": {"x": 2}},
        {"name": "x", "n": 2, "tag": "a", "in": {"x": 3}},
        {"name": "w", "tag": "A"},
    ],
    "schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": 'Où? "é" <x>', "enum": ["a", "b"]},
            "count": {"type": ["integer", "null"], "default": 3, "minimum": 0.5},
            "items": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["city"],
    },
}


class Cases:
    """Draws expressions by type, so that most of them render."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def one(self, *choices):
        return self.draw.choice(choices)

    def pick(self, depth, leaves, nodes):
        if depth <= 0 or self.draw.random() < 0.25:
            return self.draw.choice(leaves)
        return self.draw.choice(nodes)(depth - 1)

    def text(self, depth=2):
        a = lambda d: self.text(d)
        n = lambda d: self.whole(d)
        return self.pick(
            depth,
            [
                "s",
                "t",
                "e",
                "blank",
                "'ab'",
                '"it\'s"',
                "'\\n'",
                "'x' 'y'",
                "'é'",
                "words[0]",
                "rows[0].name",
                "d.a",
                "schema.properties.city.description",
                "'\\u00e9\\x41\\t\\\\'",
                "missing|default('dd')",
                "rows[1]['tag']",
                "'ǅ ß İ ﬁ'",
                "'1_000'",
                "'-12'",
                "'3.75'",
                "'%5'",
                "'<\\/a>\\d'",
                "'\\a\\v\\101\\400\\U0001F600'",
                '"\\"\\\'\\é"',
                "'a\\r\\nb\\r\\n'",
                "long|string",
            ],
            [
                lambda d: f"{a(d)} ~ {self.one(self.text, self.whole, self.flag)(d)}",
                lambda d: f"({a(d)} + {a(d)})",
                lambda d: (
                    f"{a(d)}|{self.one('upper', 'lower', 'title', 'capitalize', 'trim', 'string', 'e', 'escape', 'safe', 'forceescape', 'reverse')}"
                ),
                lambda d: (
                    f"({a(d)}).{self.one('upper', 'lower', 'title', 'capitalize', 'strip', 'lstrip', 'rstrip', 'swapcase', 'casefold', 'expandtabs')}()"
                ),
                lambda d: (
                    f"({a(d)}).{self.one('strip', 'lstrip', 'rstrip')}({self.one(repr('abH '), repr(','), 'none', repr('b>'))})"
                ),
                lambda d: (
                    f"({a(d)}).replace({self.one(repr('a'), repr('l'), repr(''), repr('xx'))}, {a(d)}{self.one('', ', 1', ', 2', ', -1', ', 0')})"
                ),
                lambda d: f"{a(d)}|replace('l', {a(d)}{self.one('', ', 1', ', count=2')})",
                lambda d: f"({a(d)})[{self.slice(d)}]",
                lambda d: f"{a(d)}|{self.one('first', 'last')}",
                lambda d: f"({a(d)} * {self.one(0, 1, 2, 3)})",
                lambda d: (
                    f"{a(d)}|{self.one('urlencode', 'striptags', 'safe|e', 'e|e', 'e|escape')}"
                ),
                lambda d: f"{self.one('d', 'rows[0]', '[(`a b`, s)]', '{1: s}')}|urlencode".replace(
                    "`", "'"
                ),
                lambda d: (
                    "{'a': " + a(d) + ", 'b': none, 'c-d': 1}|xmlattr" + self.one("", "(false)")
                ),
                lambda d: (
                    f"({self.whole(d)})|abs|filesizeformat{self.one('', '(true)', '(binary=true)')}"
                ),
                lambda d: f"{self.one('n', 'long', 'big', '1', '999', '1024 ** 3')}|filesizeformat",
                lambda d: f"(rows[:3]|{self.one('max', 'min')}(attribute='n')).name",
                lambda d: (
                    f"strftime_now({self.one('', 'format=')}'%C {self.one('%n', '%t', '%%', '%Q', '%E')}')"
                ),
                lambda d: f"{self.any(d)}|string",
                lambda d: (
                    self.json(d)
                    + "|tojson"
                    + self.one(
                        "",
                        "",
                        "(indent=2)",
                        "(ensure_ascii=true)",
                        "(sort_keys=true)",
                        '(separators=(",", ":"))',
                        "(indent=4, sort_keys=true)",
                        "(true, 1)",
                        "(indent=0)",
                        '(separators=[";", "="], indent=none)',
                    )
                ),
                lambda d: self.array(d) + "|join" + self.one("", '(", ")', '(d="-")', '("\\n")'),
                lambda d: f"rows|join(', ', attribute='{self.one('name', 'tag', 'in.x')}')",
                lambda d: (
                    a(d)
                    + ".join("
                    + self.one("words", 't.split(",")', "d", "s", 'words|map("upper")')
                    + ")"
                ),
                lambda d: (
                    f"{a(d)}|indent({self.one('', '2', '2, true', 'width=3, blank=true', 'first=true', repr('>>'))})"
                ),
                lambda d: (
                    a(d)
                    + "|truncate("
                    + self.one("", "5", "9, true", '6, false, "…", 0', "length=8, leeway=1")
                    + ")"
                ),
                lambda d: f"{a(d)}|center({n(d)} % 20)",
                lambda d: (
                    f"({a(d)}).{self.one('ljust', 'rjust', 'center', 'zfill')}({self.one(0, 3, 7, 8, 15)})"
                ),
                lambda d: f"({a(d)}).{self.one('ljust', 'rjust', 'center')}(9, '*')",
                lambda d: (
                    f"({a(d)}).{self.one('removeprefix', 'removesuffix')}({self.one(repr('a'), repr('Hel'), repr('ab'), repr(''))})"
                ),
                lambda d: (
                    f"'{self.one('%s|%s', '%5s %-5s|', '%r %r', '%.2s %s', '%s%% %s')}'|format({a(d)}, {self.any(d)})"
                ),
                lambda d: (
                    f"'{self.one('%d', '%5d', '%05d', '%-5d|', '%x', '%+d', '%s', '%o')}' % ({n(d)})"
                ),
                lambda d: (
                    f"'{self.one('%.2f', '%8.3f', '%e', '%g', '%s', '%d')}' % ({self.number(d)})"
                ),
                lambda d: f"'%s: %s' % ({a(d)}, {self.any(d)})",
                lambda d: (
                    f"({self.one('form', 'd.form', '(form ~ s)', 'form|upper', '[form][0]')} % ({a(d)}, {n(d)}))"
                ),
                lambda d: f"{self.one('form', 'd.form')} % (words[0], {n(d)} % 5) ~ {a(d)}",
                lambda d: f"{self.range()}|string",
                lambda d: "'%(a)s-%(b)s' % d",
                lambda d: (
                    f"'{self.one('{} {}', '{0} {1} {0}', '{!r:.5} {!s}', '{:.3}{:*^7}', '{:>8} {!r}', '{:^9}|{:<5}|')}'.format({a(d)}, {a(d)})"
                ),
                lambda d: (
                    f"'{self.one('{:d}', '{:05d}', '{:,}', '{:x}', '{:+d}', '{}', '{:>6}', '{:<6}|', '{:^6}')}'.format({n(d)})"
                ),
                lambda d: (
                    f"'{self.one('{:.2f}', '{:.0%}', '{:.3}', '{:+.1e}', '{:010.2f}', '{:8.1f}', '{:e}', '{:g}', '{}', '{:,.2f}')}'.format({self.number(d)})"
                ),
                lambda d: f"'{{a}} {{b}}'.format(a={a(d)}, b={n(d)})",
                lambda d: f"({a(d)} if {self.flag(d)} else {a(d)})",
                lambda d: f"({a(d)} or {a(d)})",
                lambda d: (
                    f"{self.one('missing', a(d))}|default({a(d)}{self.one('', ', true', ', boolean=true')})"
                ),
                lambda d: (
                    f"({a(d)}).{self.one('partition', 'rpartition')}({self.one(repr(','), repr('l'), repr(' '))})[{self.one(0, 1, 2, -1)}]"
                ),
                lambda d: (
                    f"({a(d)}).{self.one('split', 'rsplit')}({self.one('', repr(','), repr(' '), repr('l'), repr(',') + ', 1', 'none, 1', 'maxsplit=1')})[{self.one(0, -1)}]"
                ),
                lambda d: f"({a(d)}).splitlines({self.one('', 'true', 'keepends=true')})|join('|')",
            ],
        )

    def whole(self, depth=2):
        n = lambda d: self.whole(d)
        return self.pick(
            depth,
            [
                "0",
                "1",
                "2",
                "10",
                "n",
                "neg",
                "xs[0]",
                "rows[0].n",
                "(-5)",
                "1_000",
                "12345678901234",
                "0x1f",
                "0b101",
            ],
            [
                lambda d: f"({n(d)} {self.one('+', '-', '*')} {n(d)})",
                lambda d: f"({n(d)} {self.one('//', '%')} {self.one('2', '3', '(-3)', '7')})",
                lambda d: (
                    f"({self.one('', '-', '2 * ', '9 - ', '2 ** ')}{n(d)} % {self.one('2', '-3', '7', '2 ** 2')}{self.one('', ' * 3', ' % 4', ' + 1', ' // 2')})"
                ),
                lambda d: f"({self.one('2', '3', '(-2)', 'n')} ** {self.one('0', '1', '2', '5')})",
                lambda d: f"(-{n(d)})",
                lambda d: f"({self.one('', '2 * ', '1 - ')}+{n(d)})",
                lambda d: (
                    f"{self.one(self.text, self.array, self.mapping)(d)}|{self.one('length', 'count')}"
                ),
                lambda d: (
                    f"({self.text(d)}).{self.one('find', 'rfind', 'count')}({self.one(repr('l'), repr('a'), repr(''), repr('zz'))}{self.one('', '', ', 1', ', 1, 4', ', -3')})"
                ),
                lambda d: f"({self.text(d)} ~ 'Q').{self.one('index', 'rindex')}('Q')",
                lambda d: f"xs.{self.one('count', 'index')}({self.one('1', '2', '3')})",
                lambda d: f"{self.any(d)}|int({self.one('', '5', 'default=7')})",
                lambda d: (
                    f"'{self.one('ff', '0x1F', '101', '12')}'|int(base={self.one(16, 10, 2)})"
                ),
                lambda d: f"xs|{self.one('sum', 'max', 'min', 'first', 'last')}",
                lambda d: "rows[:3]|sum(attribute='n')",
                lambda d: f"{n(d)}|abs",
                lambda d: f"{self.text(d)}|wordcount",
                lambda d: f"({n(d)} if {self.flag(d)} else {n(d)})",
                lambda d: f"({n(d)} and {n(d)})",
                lambda d: f"range({self.one('5', '1, 9', '9, 1, -2', '0')})|length",
                lambda d: "(true + 1)",
            ],
        )

    def number(self, depth=2):
        x = lambda d: self.number(d)
        return self.pick(
            depth,
            [
                "f",
                "1.0",
                "0.1",
                "1e3",
                "1.5e-7",
                "big",
                "tiny",
                "100.0",
                "123456789.125",
                "1e16",
                "(-0.0)",
                "n",
                "2",
            ],
            [
                lambda d: f"({x(d)} {self.one('+', '-', '*')} {x(d)})",
                lambda d: f"({x(d)} / {self.one('2', '3', '0.5', '7')})",
                lambda d: f"({x(d)} {self.one('//', '%')} {self.one('2', '0.75', '(-3)')})",
                lambda d: f"({self.one('2', 'f', '10')} ** {self.one('0.5', '(-1)', '3')})",
                lambda d: (
                    x(d)
                    + "|round"
                    + self.one("", "(1)", "(2)", '(1, "floor")', '(0, "ceil")', "(precision=1)")
                ),
                lambda d: (
                    f"{self.one(self.text, self.number)(d)}|float{self.one('', '(1.5)', '(default=0.25)')}"
                ),
                lambda d: f"({x(d)})|abs",
            ],
        )

    def flag(self, depth=2):
        b = lambda d: self.flag(d)
        return self.pick(
            depth,
            ["yes", "no", "true", "False", "none", "missing", "n", "e", "empty", "d", "xs"],
            [
                lambda d: self.generator(),
                lambda d: (
                    f"({self.generator()} is {self.one('sequence', 'iterable', 'string', 'mapping', 'defined')})"
                ),
                lambda d: f"({b(d)} {self.one('and', 'or')} {b(d)})",
                lambda d: f"(not {b(d)})",
                lambda d: (
                    f"({self.number(d)} {self.one('<', '<=', '>', '>=', '==', '!=')} {self.number(d)})"
                ),
                lambda d: f"({self.text(d)} {self.one('<', '==', '!=', '>=')} {self.text(d)})",
                lambda d: f"({self.any(d)} {self.one('==', '!=')} {self.any(d)})",
                lambda d: f"({self.whole(d)} < {self.whole(d)} <= {self.whole(d)})",
                lambda d: f"({self.text(d)} {self.one('in', 'not in')} {self.text(d)})",
                lambda d: f"({self.any(d)} {self.one('in', 'not in')} {self.array(d)})",
                lambda d: f"({self.text(d)} in {self.mapping(d)})",
                lambda d: (
                    f"({self.any(d)} is {self.one('', 'not ')}{self.one('defined', 'undefined', 'none', 'string', 'mapping', 'sequence', 'iterable', 'number', 'integer', 'float', 'boolean', 'true', 'false', 'callable')})"
                ),
                lambda d: (
                    f"({self.whole(d)} is {self.one('odd', 'even', 'divisibleby 3', 'divisibleby(2)', 'eq 7', 'ne(1)', 'gt 2', 'lessthan 5', 'in [1, 2, 7]', 'ge(0)')})"
                ),
                lambda d: (
                    f"({self.text(d)} is {self.one('lower', 'upper', 'in words', 'eq(t)', 'sameas s')})"
                ),
                lambda d: (
                    f"({self.text(d)}).{self.one('startswith', 'endswith')}({self.one(repr('a'), repr('H'), '(' + repr('x') + ', ' + repr('a') + ')', repr(''))})"
                ),
                lambda d: (
                    f"({self.text(d)}).{self.one('isdigit', 'isalpha', 'isalnum', 'isspace', 'islower', 'isupper', 'istitle', 'isascii', 'isnumeric', 'isdecimal', 'isidentifier', 'isprintable')}()"
                ),
                lambda d: f"('{self.one('upper', 'nofilter', 'tojson')}' is filter)",
                lambda d: f"('{self.one('odd', 'notest', 'mapping')}' is test)",
            ],
        )

    def array(self, depth=2):
        a = lambda d: self.array(d)
        return self.pick(
            depth,
            [
                "xs",
                "words",
                "empty",
                "mixed",
                "[1, 'a', none]",
                "(1, 2)",
                "(1,)",
                "[[1, 2], [3]]",
                "missing",
                "()",
                "schema.required",
                "d['items']",
                "[1.0, 1e20, true]",
            ],
            [
                lambda d: f"[{self.any(d)}, {self.any(d)}]",
                lambda d: f"({self.any(d)}, {self.any(d)})",
                lambda d: f"({self.one('xs', 'words', '[0]')} + {self.one('[9]', 'xs', 'empty')})",
                lambda d: f"({self.one('xs', 'words', '(1,)')} * {self.one(0, 1, 2)})",
                lambda d: f"({a(d)}|list)[{self.slice(d)}]",
                lambda d: (
                    f"{a(d)}|{self.one('list', 'reverse|list', 'batch(2)|list', 'batch(3, 0)|list', 'slice(2)|list', 'slice(3, none)|list')}"
                ),
                lambda d: f"xs|{self.one('sort', 'sort(reverse=true)', 'unique|list')}",
                lambda d: (
                    f"words|{self.one('sort', 'sort(true)', 'sort(case_sensitive=true)', 'unique|list', 'unique(true)|list', 'sort(reverse=true)')}"
                ),
                lambda d: (
                    f"rows|map(attribute='{self.one('name', 'n', 'in.x', 'none')}'{self.one('', ', default=0')})|list"
                ),
                lambda d: (
                    f"{self.one('words', 'xs')}|map('{self.one('string', 'upper', 'title')}')|list"
                ),
                lambda d: "words|map('replace', 'p', 'P')|list",
                lambda d: (
                    f"rows|{self.one('selectattr', 'rejectattr')}({self.one(repr('n'), repr('n') + ', ' + repr('defined'), repr('n') + ', ' + repr('equalto') + ', 2', repr('tag') + ', ' + repr('in') + ', [' + repr('a') + ', ' + repr('b') + ']', repr('name') + ', ' + repr('!=') + ', ' + repr('z'), repr('in') + ', ' + repr('mapping'))})|map(attribute='name')|list"
                ),
                lambda d: (
                    self.one("xs", "mixed", '[0, 1, none, ""]')
                    + "|"
                    + self.one("select", "reject")
                    + "("
                    + self.one(
                        "", repr("string"), repr("number"), repr("none"), repr("in") + ", [1, 2]"
                    )
                    + ")|list"
                ),
                lambda d: (
                    f"rows|sort(attribute='{self.one('name', 'tag', 'tag,name')}')|map(attribute='name')|list"
                ),
                lambda d: "rows|groupby('tag')|map('first')|list",
                lambda d: (
                    f"rows|groupby({self.one(repr('tag'), repr('name'), repr('in.x') + ', 0', repr('n') + ', default=0', repr('tag') + ', case_sensitive=true')}){self.one('', '|list', '[0]', '[0].list', '|map(`last`)|list')}".replace(
                        "`", "'"
                    )
                ),
                lambda d: "[[1, 2], [1, 3], [0, 4]]|groupby(0)",
                lambda d: self.range(),
                lambda d: (
                    f"rows|groupby('{self.one('tag', 'name')}')|map(attribute='{self.one('grouper', '0')}')|list"
                ),
                lambda d: (
                    f"rows|unique(attribute='{self.one('tag', 'name')}')|map(attribute='name')|list"
                ),
                lambda d: (
                    f"{self.mapping(d)}|{self.one('list', 'dictsort', 'dictsort(reverse=true)', 'items|list')}"
                ),
                lambda d: (
                    f"{self.one('d', 'schema', 'rows[0]')}.{self.one('items', 'keys', 'values')}()|list"
                ),
                lambda d: (
                    f"({self.text(d)}).{self.one('split', 'rsplit')}({self.one('', repr(','), repr(' '), repr('l') + ', 1', 'none, 1', 'maxsplit=1', 'sep=' + repr(','))})"
                ),
                lambda d: f"({self.text(d)}).splitlines({self.one('', 'true')})",
                lambda d: f"({self.text(d)}).{self.one('partition', 'rpartition')}(',')",
                lambda d: f"{self.text(d)}|list",
                lambda d: f"range({self.one('5', '1, 9, 3', '9, 1, -2', 'n')})|list",
                lambda d: f"({a(d)} if {self.flag(d)} else {a(d)})",
            ],
        )

    def mapping(self, depth=2):
        m = lambda d: self.mapping(d)
        return self.pick(
            depth,
            [
                "d",
                "rows[0]",
                "schema.properties",
                "{}",
                "{'a': 1}",
                "{1: 'x', 'y': none, 2: 2.0}",
                "schema",
            ],
            [
                lambda d: "{" + f"'k': {self.any(d)}, 'l': {self.any(d)}" + "}",
                lambda d: f"dict(a={self.any(d)}, b={self.whole(d)})",
                lambda d: f"dict([('k', {self.any(d)}), ['l', 1]]{self.one('', ', k=2')})",
                lambda d: f"dict({self.one('d', 'rows[0]')}.items(), z={self.any(d)})",
                lambda d: f"dict({self.one('d', 'rows[0]')}, z={self.any(d)})",
                lambda d: f"{m(d)}.copy()",
                lambda d: f"({m(d)} if {self.flag(d)} else {m(d)})",
                lambda d: f"{m(d)}.get('{self.one('in', 'city', 'zz')}', " + "{})",
                lambda d: f"rows|{self.one('first', 'last')}",
            ],
        )

    def range(self):
        """A `range`, which prints as one."""
        of = f"range({self.one('5', '0', '1, 9', '9, 1, -2', '5, 1', '1, 10, 3', '-3, n')})"
        return of + self.one("", f"[{self.slice(0)}]", f"[{self.slice(0)}]")

    def generator(self):
        """A value that can be iterated over once, and is true."""
        return (
            "("
            + self.one(
                "rows|selectattr('nope')",
                "rows|rejectattr('name')",
                "xs|map('string')",
                "empty|map('upper')",
                "xs|select('gt', 9)",
                "xs|reject('odd')",
                "empty|batch(2)",
                "rows[0]|items",
                "empty|reverse",
            )
            + ")"
        )

    def json(self, depth=2):
        """A value of JSON's types."""
        return self.pick(
            depth,
            [
                "d",
                "schema",
                "rows",
                "mixed",
                "words",
                "s",
                "n",
                "big",
                "nil",
                "f",
                "{}",
                "[]",
                "'a/b<c>&\\u2028 😀'",
                "long",
                "longs",
            ],
            [
                lambda d: f"[{self.json(d)}, {self.json(d)}]",
                lambda d: "{" + f"'z': {self.json(d)}, 'a': {self.json(d)}, 'é': 1" + "}",
                lambda d: f"({self.json(d)}, {self.text(d)})",
                lambda d: self.text(d),
                lambda d: self.number(d),
                lambda d: self.whole(d),
            ],
        )

    def any(self, depth=2):
        if self.draw.random() < 0.06:
            return self.one(
                "missing", "d.nothing", "nil.x", "xs[99]", "s.nothing", "none", "(1 if no)"
            )
        return self.one(self.text, self.whole, self.number, self.flag, self.array, self.mapping)(
            depth
        )

    def slice(self, depth):
        part = lambda: self.one("", "0", "1", "-1", "2", "-3", "5", "99", "-99")
        return self.one(
            f"{part()}:{part()}",
            f"{part()}:{part()}:{self.one('1', '2', '-1', '-2', '')}",
            f":{part()}",
        )

    # Statements

    def ws(self):
        return self.one("", "", "", "-", "+")

    def tag(self, body):
        # `+` is whitespace control only at the beginning of a statement, and at its end.
        return f"{{%{self.ws()} {body} {self.ws()}%}}"

    def show(self, depth):
        open_, close = self.one("", "", "-"), self.one("", "", "-")
        return f"{{{{{open_} {self.any(depth)} {close}}}}}"

    def filler(self):
        return self.one(
            "",
            " ",
            "\n",
            "\n\n",
            "  \n",
            "x",
            " y\n",
            "\n  z ",
            "<|im_start|>",
            "{",
            "}",
            "%}",
            "'",
            "{# c #}",
            "  {#- c -#} \n",
            "{# c +#}\n",
            "{% raw %} {{ x }} {%- endraw %}\n",
        )

    def body(self, depth, loop=False):
        parts = []
        for _ in range(self.draw.randrange(1, 4)):
            parts.append(self.filler())
            parts.append(self.statement(depth - 1, loop))
        parts.append(self.filler())
        return "".join(parts)

    def statement(self, depth, loop=False):
        t = self.tag
        if depth <= 0:
            return self.show(1)
        name = self.one("u", "v", "w")
        kinds = [
            lambda: self.show(2),
            lambda: t(f"if {self.flag(1)}") + self.body(depth, loop) + t("endif"),
            lambda: (
                t(f"if {self.flag(1)}")
                + self.body(depth, loop)
                + t(f"elif {self.flag(1)}")
                + self.filler()
                + t("else")
                + self.body(depth, loop)
                + t("endif")
            ),
            lambda: (
                t(f"for x in {self.array(1)}")
                + self.body(depth, True)
                + self.loop_show()
                + t("endfor")
            ),
            lambda: (
                t(
                    f"for x in {self.one('xs', 'words', 'mixed')} if {self.one('x', 'x != 1', 'x is string', 'x is not none')}"
                )
                + self.loop_show()
                + self.body(depth, True)
                + t("else")
                + self.filler()
                + t("endfor")
            ),
            lambda: (
                t(
                    f"for k, x in {self.one('d.items()', 'd|dictsort', 'schema.properties|items', 'rows[0].items()', '[(1, 2), (3, 4)]')}"
                )
                + "{{ k }}"
                + self.loop_show()
                + self.body(depth, True)
                + t("endfor")
            ),
            lambda: t(f"set {name} = {self.any(1)}") + self.filler() + f"{{{{ {name} }}}}",
            lambda: (
                t(f"set {name}, y = {self.any(1)}, {self.any(1)}") + f"{{{{ {name} }}}}{{{{ y }}}}"
            ),
            lambda: (
                t(f"set {name}")
                + self.body(depth, loop)
                + t("endset")
                + f"{{{{ {name}|length }}}}{{{{ {name} }}}}"
            ),
            lambda: (
                t(
                    f"set {name} | {self.one('upper', 'trim', 'replace(`x`, `y`)', 'indent(2)')}".replace(
                        "`", "'"
                    )
                )
                + self.body(depth, loop)
                + t("endset")
                + f"{{{{ {name} }}}}"
            ),
            lambda: (
                t(f"with {name} = {self.any(1)}, q = 1")
                + self.body(depth)
                + f"{{{{ {name} }}}}"
                + t("endwith")
            ),
            lambda: (
                t(
                    f"filter {self.one('upper', 'trim', 'replace(` `, `_`)', 'indent')}".replace(
                        "`", "'"
                    )
                )
                + self.body(depth)
                + t("endfilter")
            ),
            lambda: (
                t(f"with {name} = {self.any(1)}, q = {self.one(name, '[' + name + ', 1]')}")
                + f"{{{{ q }}}}{{{{ {name} }}}}"
                + t("endwith")
            ),
            lambda: self.scope(name),
            lambda: (
                t("set ns = namespace(c=0, l=[])")
                + t("for x in xs")
                + t("set ns.c = ns.c + x")
                + t("set ns.l = ns.l + [x]")
                + t("endfor")
                + "{{ ns.c }}{{ ns.l }}"
            ),
            lambda: (
                t(f"set g = {self.generator()}")
                + self.one(
                    "{{ g|join }}{{ g|list }}{% for x in g %}{{ x }}{% endfor %}",
                    "{% for x in g %}{{ loop.length }}{{ loop.last }}{{ x }}{% else %}-{% endfor %}{{ g|list }}",
                    "{{ g|first }}{{ g|list }}{{ g|join }}",
                    "{{ g[0] }}{{ g[1:] }}{{ g|list|length }}",
                    "{{ g|tojson }}",
                    "{{ g|length }}",
                    "{{ g|last }}",
                )
            ),
            lambda: (
                t(
                    f"set {name}, y = {self.one(repr('xy'), 'xs[:2]', 'words[:2]|map(`upper`)', '(1, 2)')}".replace(
                        "`", "'"
                    )
                )
                + f"{{{{ {name} }}}}{{{{ y }}}}"
            ),
            lambda: (
                t(f"set j = joiner({self.one('', repr('|'), 'sep=' + repr(';'), '1')})")
                + t("for x in xs")
                + "{{ j() }}{{ x }}"
                + t("endfor")
            ),
            lambda: (
                t(f"set c = cycler({self.one('1', '1, none', repr('a') + ', 2.5, xs')})")
                + "{{ c.current }}"
                + t("for x in xs")
                + "{{ c.next() }}{{ c.current }}"
                + t("endfor")
                + "{{ c.reset() }}{{ c.next() }}"
            ),
            lambda: (
                t("set ns = namespace([('a', 1)], b=2)")
                + t("set ns.a = ns.a + ns.b")
                + "{{ ns.a }}"
                + self.one("", "{{ ns|tojson }}")
            ),
            lambda: (
                t(f"set r = range({self.one('5', '2, 9, 3', '5, 0, -2')})")
                + self.one(
                    "{{ r[1] }}{{ r[-1] }}{{ r|length }}{{ 2 in r }}",
                    "{{ r|tojson }}",
                    "{{ r|list|tojson }}{{ r|sum }}",
                )
            ),
            lambda: (
                t(f"autoescape {self.one('true', 'false')}")
                + self.one("{{ s }}", "{{ s|safe }}", "{{ s|e }}", "{{ xs }}")
                + t("endautoescape")
                + "{{ s }}"
            ),
            lambda: "{{+ " + self.whole(1) + " }}",
            lambda: (
                t(f"macro m(a, b={self.one('1', repr('q'), 'a')})")
                + "{{ a }}|{{ b }}"
                + self.body(depth)
                + t("endmacro")
                + "{{ "
                + self.one("m(1)", "m(1, 2)", "m(b=3, a=xs)", "m()", "m(b='z')")
                + " }}"
            ),
            lambda: (
                t("macro m(a)")
                + "{{ a }}{{ varargs }}{{ kwargs }}"
                + t("endmacro")
                + "{{ "
                + self.one("m(1)", "m(1, 2, 'x')", "m(1, z=2, y=[1])", "m(a=1, q=none)", "m()")
                + " }}"
            ),
            lambda: (
                t("macro m(a)")
                + "[{{ caller(a) if caller else '-' }}]"
                + t("endmacro")
                + t(f"call(v) m({self.any(1)})")
                + "<{{ v }}>"
                + self.body(depth)
                + t("endcall")
            ),
            lambda: (
                t("macro m()")
                + "({{ caller() }})"
                + t("endmacro")
                + t("call m()")
                + self.body(depth)
                + t("endcall")
            ),
            lambda: t("generation") + self.body(depth) + t("endgeneration"),
            lambda: (
                t("for x in mixed recursive")
                + "{{ loop.depth }}"
                + t("if x is sequence and x is not string and x is not mapping")
                + "{{ loop(x) }}"
                + t("else")
                + "{{ x }}"
                + t("endif")
                + t("endfor")
            ),
            lambda: (
                t("for x in xs")
                + t("if loop.index > 1 and x != 9")
                + t("for y in words")
                + "{{ loop.index }}{{ x }}"
                + t("endfor")
                + t("endif")
                + t("endfor")
            ),
        ]
        if loop:
            kinds += [
                lambda: (
                    t(f"if {self.one('x == 2', 'loop.index > 2', 'loop.last')}")
                    + t(self.one("break", "continue"))
                    + t("endif")
                ),
                lambda: self.loop_show(),
            ]
        return self.draw.choice(kinds)()

    def scope(self, name):
        """A variable that is set in a scope and outside of it."""
        begin, end = self.one(
            ("filter upper", "endfilter"),
            ("set x", "endset"),
            ("set x | trim", "endset"),
            ("autoescape false", "endautoescape"),
            ("generation", "endgeneration"),
            ("with", "endwith"),
        )
        return (
            self.tag(f"set {name} = {self.whole(1)}")
            + self.tag(begin)
            + self.filler()
            + self.tag(f"set {name} = {self.any(1)}")
            + f"{{{{ {name} }}}}"
            + self.filler()
            + self.tag(end)
            + f"{{{{ {name} }}}}{{{{ x }}}}"
        )

    def loop_show(self):
        return self.one(
            "{{ loop.index }}",
            "{{ loop.index0 }}/{{ loop.length }}",
            "{{ loop.first }}{{ loop.last }}",
            "{{ loop.revindex }}{{ loop.revindex0 }}",
            "{{ loop.cycle('a', 'b') }}",
            "{{ loop.changed(x) }}",
            "{{ loop.previtem is defined }}",
            "{{ loop.nextitem }}",
            "{{ ', ' if not loop.last }}",
            "{{ x }}",
            "{{ loop.previtem|default('-') }}",
        )

    def template(self):
        return self.one(
            lambda: self.show(3),
            lambda: self.show(3),
            lambda: self.body(3),
        )()


TEXTS = [
    "Hi",
    "  spaced \n",
    "Où? \"é\" <x> & 'y'",
    "line\nline\n\n",
    "<think>\nhm\n</think>\n\nSo.",
    "no thought</think>yes",
    "<answer> a </answer>",
    "<tool_response>x</tool_response>",
    "/no_think please",
    "",
    "漢字 😀",
    "{{ not.a.template }} {% if %}",
]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": " Weather of a city. ",
            "parameters": VARIABLES["schema"],
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": 'Finds "é" <b>',
            "parameters": {
                "type": "object",
                "properties": {
                    "q": {"type": "string", "description": "what"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "filter": {
                        "type": "object",
                        "properties": {"a": {"type": "boolean"}, "b": {"type": "array"}},
                        "required": ["a"],
                    },
                    "n": {"type": ["integer", "null"], "default": 3},
                    "keys": {"oneOf": [{"type": "string"}, {"type": "number"}]},
                },
                "additionalProperties": False,
                "required": ["q", "n"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]

ARGUMENTS = [
    {},
    {"city": "Zürich", "count": 2},
    {"q": 'a "b"', "tags": ["x", "y"], "filter": {"a": True, "b": None}, "items": 1.5},
    {"text": "two\nlines", "n": -1, "values": [1, 2.0, 1e30]},
    {"id": 98765432109876543210, "ids": [-(2**63) - 1, 10**40], "zero": -0.0},
    {"x": float("nan"), "y": [float("inf"), -float("inf")], "id": 2**64},
]


def chat(draw):
    """A request to `/tokenize` with a conversation."""
    messages = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": draw.choice(TEXTS)})
    tools = draw.sample(TOOLS, draw.randrange(1, 4)) if draw.random() < 0.5 else None
    for _ in range(draw.randrange(1, 4)):
        messages.append({"role": "user", "content": draw.choice(TEXTS)})
        while tools and draw.random() < 0.4:
            calls = []
            for _ in range(draw.randrange(1, 3)):
                name = draw.choice(tools)["function"]["name"]
                arguments = json.dumps(draw.choice(ARGUMENTS), ensure_ascii=draw.random() < 0.5)
                identity = f"call{draw.randrange(10_000, 99_999)}"
                function = {"name": name, "arguments": arguments}
                calls.append({"id": identity, "type": "function", "function": function})
            said = {"role": "assistant", "content": draw.choice([None, "", *TEXTS])}
            messages.append({**said, "tool_calls": calls})
            for call in calls:
                result = {"role": "tool", "tool_call_id": call["id"]}
                if draw.random() < 0.3:
                    result["name"] = call["function"]["name"]
                messages.append({**result, "content": draw.choice(['{"ok": true}', *TEXTS])})
        message = {"role": "assistant", "content": draw.choice(TEXTS)}
        if draw.random() < 0.4:
            message[draw.choice(["reasoning", "reasoning_content"])] = draw.choice(TEXTS)
        messages.append(message)
    if draw.random() < 0.7:
        messages.pop()
    request = {"messages": messages, "add_generation_prompt": draw.random() < 0.7}
    if tools:
        request["tools"] = tools
    # Special tokens, which these templates have from the request.
    kwargs = {"bos_token": "<s>", "eos_token": "</s>"}
    if draw.random() < 0.5:
        kwargs["enable_thinking"] = draw.random() < 0.5
    if draw.random() < 0.2:
        kwargs["controls"] = {"length": "short", "a": [1]}
    if draw.random() < 0.2:
        kwargs["python_tools"] = [{"title": "T", "text": "é"}]
    request["chat_template_kwargs"] = kwargs
    return request


def seen(request, *, as_parts):
    """Variables that a template gets: vLLM's messages, as `transformers` completes them.

    `as_parts`: the template iterates over contents, so it gets them as lists of parts.
    """
    messages = []
    for sent in request["messages"]:
        content = sent["content"] or ""
        if as_parts and sent["role"] != "tool":
            content = [] if sent["content"] is None else [{"type": "text", "text": content}]
        message = {"role": sent["role"], "content": content}
        calls = copy.deepcopy(sent.get("tool_calls"))
        for call in calls or []:
            # The order of fields in the class of vLLM.
            arguments = json.loads(call["function"]["arguments"])
            call["function"] = {"arguments": arguments, "name": call["function"]["name"]}
        if calls:
            message["tool_calls"] = calls
        reasoning = sent.get("reasoning", sent.get("reasoning_content"))
        if reasoning is not None:
            message = {"thinking": reasoning, **message}
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        for name in ("tool_call_id", "name"):
            if name in sent:
                message[name] = sent[name]
        messages.append(message)
    return {
        "messages": messages,
        "tools": request.get("tools"),
        "documents": None,
        "add_generation_prompt": request["add_generation_prompt"],
        **request["chat_template_kwargs"],
    }
