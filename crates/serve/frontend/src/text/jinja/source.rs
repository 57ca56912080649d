//! Rewrites a template's source where the engine does not parse Jinja2's grammar.

use std::fmt::Write;

use super::literal;

/// A template that cannot be read, with its line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SourceError {
    pub(crate) line: usize,
    pub(crate) message: String,
}

/// Name of the function that lets a macro take any arguments.
pub(super) const VARIADIC: &str = "__variadic";
/// Name of the filter that replaces `%`.
pub(super) const PERCENT: &str = "__percent";
/// Name of the filter that refuses values that are not iterable.
pub(super) const EACH: &str = "__each";
/// Name of the method that replaces a slice.
pub(super) const SLICE: &str = "__slice";

/// Rewrites `source`, line by line in place, so that the engine's line numbers stay true:
///
/// - line ends become `\n`, as Jinja2 has them;
/// - `{% generation %}` of `transformers`, which marks the assistant's text for training and is a
///   scope of its own, becomes `{% with %}`;
/// - macros that name `varargs` or `kwargs` get them as parameters, and [`VARIADIC`] fills them;
/// - defaults of a macro's parameters that name its other parameters move into its body;
/// - the value that a loop iterates over passes through [`EACH`]: the engine treats `none` as an empty list;
/// - `x % y` becomes a call of the filter [`PERCENT`], and `x[a:b:c]` a call of the method [`SLICE`]: the engine's own
///   slices panic if they go backwards;
/// - strings with escapes are written as the engine reads them;
/// - a `+` in front of a value is left out;
/// - the value that `{% set a, b = … %}` takes apart passes through [`EACH`] too;
/// - the bodies of `filter`, `autoescape` and `set` without a value are put into `{% with %}`, as they are scopes;
/// - `{% with a = 1, b = a %}` becomes `{% with (a, b) = (1, a) %}`: its values are those outside.
pub(crate) fn rewrite(source: &str) -> Result<String, SourceError> {
    let source = if source.contains('\r') {
        source.replace("\r\n", "\n").replace('\r', "\n")
    } else {
        source.to_owned()
    };
    let mut writer = Writer {
        source: &source,
        at: 0,
        out: String::with_capacity(source.len() + 64),
        macros: Vec::new(),
        generations: Vec::new(),
        scopes: Vec::new(),
        wrong: None,
    };
    while let Some(offset) = source[writer.at..].find('{') {
        let start = writer.at + offset;
        writer.copy_to(start);
        match source.as_bytes().get(start + 1) {
            Some(b'#') => {
                // An open comment is the engine's error to report.
                let end = source[start + 2..].find("#}");
                writer.copy_to(end.map_or(source.len(), |end| start + 2 + end + 2));
            }
            Some(b'{') => writer.expression(start),
            Some(b'%') => writer.statement(start)?,
            _ => writer.copy_to(start + 1),
        }
    }
    writer.copy_to(source.len());
    if let Some(&at) = writer.generations.last() {
        return Err(writer.error(at, "`generation` has no `endgeneration`"));
    }
    match writer.wrong {
        Some(error) => Err(error),
        None => Ok(writer.out),
    }
}

/// A token of an expression or a statement, by its place in the source.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Token {
    kind: Kind,
    start: usize,
    end: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Text,
    Name,
    Number,
    /// One character of an operator.
    Sign(u8),
}

/// A macro whose end was not reached.
struct OpenMacro {
    name: String,
    parameters: Vec<String>,
    /// Where more parameters go in the output.
    more: usize,
    varargs: bool,
    kwargs: bool,
    caller: bool,
}

struct Writer<'s> {
    source: &'s str,
    /// Everything before it was written.
    at: usize,
    out: String,
    macros: Vec<OpenMacro>,
    /// Places of `generation` whose end was not reached.
    generations: Vec<usize>,
    /// Ends of the scopes that are open.
    scopes: Vec<&'static str>,
    /// The first string that cannot be read.
    wrong: Option<SourceError>,
}

impl Writer<'_> {
    fn error(&self, at: usize, message: &str) -> SourceError {
        SourceError {
            line: 1 + self.source[..at].matches('\n').count(),
            message: message.to_owned(),
        }
    }

    fn copy_to(&mut self, end: usize) {
        self.out.push_str(&self.source[self.at..end]);
        self.at = end;
    }

    /// Copies up to `start`, and writes `text` for what lies between `start` and `end`.
    fn replace(&mut self, start: usize, end: usize, text: &str) {
        self.copy_to(start);
        self.out.push_str(text);
        self.at = end;
    }

    fn text(&self, token: Token) -> &str {
        &self.source[token.start..token.end]
    }

    /// Whether a value may end with `token`.
    fn is_value(&self, token: Token) -> bool {
        const WORDS: [&str; 9] = [
            "in",
            "is",
            "not",
            "and",
            "or",
            "if",
            "elif",
            "else",
            "recursive",
        ];
        match token.kind {
            Kind::Text => true,
            Kind::Name => !WORDS.contains(&self.text(token)),
            Kind::Sign(sign) => matches!(sign, b')' | b']' | b'}'),
            Kind::Number => false,
        }
    }

    /// Tokens up to the closing `close`, and the place behind it. `None` if it is not closed, which the
    /// engine reports.
    fn tokens(&self, start: usize, close: [u8; 2]) -> Option<(Vec<Token>, usize)> {
        let bytes = self.source.as_bytes();
        let mut at = start + 2;
        let mut depth = 0usize;
        let mut tokens = Vec::new();
        if matches!(bytes.get(at), Some(b'-' | b'+')) {
            at += 1;
        }
        loop {
            let byte = *bytes.get(at)?;
            if depth == 0 && bytes[at..].starts_with(&close) {
                // Whitespace control is part of the end.
                if let Some(last) = tokens.last()
                    && matches!(last, Token { kind: Kind::Sign(b'-' | b'+'), end, .. } if *end == at)
                {
                    tokens.pop();
                }
                return Some((tokens, at + 2));
            }
            let from = at;
            let kind = match byte {
                b' ' | b'\t' | b'\n' | 0x0b | 0x0c => {
                    at += 1;
                    continue;
                }
                b'\'' | b'"' => {
                    at += 1;
                    loop {
                        match *bytes.get(at)? {
                            b'\\' => at += 2,
                            other if other == byte => break,
                            _ => at += 1,
                        }
                    }
                    at += 1;
                    Kind::Text
                }
                b'0'..=b'9' => {
                    let is_member = tokens.last().is_some_and(|last: &Token| {
                        last.kind == Kind::Sign(b'.') && last.end == at
                    });
                    at += number_len(&bytes[at..], !is_member);
                    Kind::Number
                }
                _ if byte.is_ascii_alphabetic() || byte == b'_' || byte >= 0x80 => {
                    let part = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_' || *b >= 0x80;
                    while bytes.get(at).is_some_and(part) {
                        at += 1;
                    }
                    Kind::Name
                }
                _ => {
                    match byte {
                        b'(' | b'[' | b'{' => depth += 1,
                        b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                        _ => {}
                    }
                    at += 1;
                    Kind::Sign(byte)
                }
            };
            let token = Token {
                kind,
                start: from,
                end: at,
            };
            tokens.push(token);
        }
    }

    /// Writes `{{ … }}`.
    fn expression(&mut self, start: usize) {
        let Some((tokens, end)) = self.tokens(start, *b"}}") else {
            return self.copy_to(self.source.len());
        };
        // Whitespace has no control here: a sign of the value.
        if self.source.as_bytes().get(start + 2) == Some(&b'+') {
            self.replace(start + 2, start + 3, "");
        }
        self.write_tokens(&tokens);
        self.copy_to(end);
    }

    /// Writes `{% … %}`, and all of a raw block.
    fn statement(&mut self, start: usize) -> Result<(), SourceError> {
        let Some((tokens, end)) = self.tokens(start, *b"%}") else {
            self.copy_to(self.source.len());
            return Ok(());
        };
        let Some(first) = tokens.first().copied() else {
            self.copy_to(end);
            return Ok(());
        };
        match self.text(first) {
            "raw" if tokens.len() == 1 => {
                let end = self.raw_end(end).unwrap_or(self.source.len());
                self.copy_to(end);
            }
            "generation" | "endgeneration" => {
                if tokens.len() > 1 {
                    return Err(self.error(start, "`generation` takes no arguments"));
                }
                let tag = if self.text(first) == "generation" {
                    self.generations.push(start);
                    "with"
                } else if self.generations.pop().is_some() {
                    "endwith"
                } else {
                    return Err(self.error(start, "`endgeneration` without `generation`"));
                };
                self.replace(first.start, first.end, tag);
                self.copy_to(end);
            }
            "do" | "import" | "from" | "include" | "extends" => {
                let tag = self.text(first);
                let message = format!("`{tag}` is not a statement of chat templates");
                return Err(self.error(start, &message));
            }
            "for" => {
                self.loop_start(&tokens);
                self.copy_to(end);
            }
            "set" => {
                let is_block = !self.set(&tokens);
                self.scope_start(is_block.then_some("endset"), end);
            }
            "filter" | "autoescape" => {
                let closes = if self.text(first) == "filter" {
                    "endfilter"
                } else {
                    "endautoescape"
                };
                self.write_tokens(&tokens);
                self.scope_start(Some(closes), end);
            }
            "endset" | "endfilter" | "endautoescape" => {
                if self
                    .scopes
                    .last()
                    .is_some_and(|closes| *closes == self.text(first))
                {
                    self.scopes.pop();
                    self.replace(first.start, first.start, "endwith %}{% ");
                }
                self.copy_to(end);
            }
            "with" => {
                self.with(&tokens);
                self.copy_to(end);
            }
            "macro" => self.macro_start(&tokens, end),
            "endmacro" => self.macro_end(end),
            _ => {
                self.write_tokens(&tokens);
                self.copy_to(end);
            }
        }
        Ok(())
    }

    /// The place behind the `endraw` of a raw block whose content begins at `at`.
    fn raw_end(&self, mut at: usize) -> Option<usize> {
        loop {
            let start = at + self.source[at..].find("{%")?;
            let inner = self.source[start + 2..].trim_start_matches(['-', '+']);
            if let Some(rest) = inner.trim_ascii_start().strip_prefix("endraw") {
                let rest = rest.trim_ascii_start().trim_start_matches(['-', '+']);
                if let Some(rest) = rest.strip_prefix("%}") {
                    return Some(self.source.len() - rest.len());
                }
            }
            at = start + 2;
        }
    }

    fn loop_start(&mut self, tokens: &[Token]) {
        let mut depth = 0;
        let mut outside = |token: &Token| {
            depth = deeper(depth, *token);
            depth == 0 && token.kind == Kind::Name
        };
        let mut word = |from: usize, words: &[&str]| {
            let mut found = tokens.iter().skip(from);
            let found =
                found.position(|token| outside(token) && words.contains(&self.text(*token)));
            found.map(|at| from + at)
        };
        let Some(from) = word(0, &["in"]).map(|at| at + 1) else {
            return self.write_tokens(tokens);
        };
        let to = word(from, &["if", "recursive"]).unwrap_or(tokens.len());
        let over = &tokens[from..to];
        self.write_tokens(&tokens[..from]);
        // A filter may give a generator, whose length a loop knows.
        if let (Some(first), Some(last)) = (over.first(), over.last()) {
            self.copy_to(first.start);
            self.out.push('(');
            self.write_tokens(over);
            self.copy_to(last.end);
            let _ = write!(self.out, ")|{EACH}");
        } else {
            self.write_tokens(over);
        }
        self.write_tokens(&tokens[to..]);
    }

    /// Writes the end of a statement, and begins a scope behind it that `closes`.
    fn scope_start(&mut self, closes: Option<&'static str>, end: usize) {
        if let Some(closes) = closes {
            self.scopes.push(closes);
            // The statement's whitespace control goes to the scope.
            self.copy_to(self.close(end));
            self.out.push_str("%}{% with ");
        }
        self.copy_to(end);
    }

    /// Writes `with …`, with several values as one tuple.
    fn with(&mut self, tokens: &[Token]) {
        let parts = split(&tokens[1..], b',');
        let is_assignment = |part: &&[Token]| matches!(part, [name, is, _, ..] if name.kind == Kind::Name && is.kind == Kind::Sign(b'='));
        if parts.len() == 1 || !parts.iter().all(is_assignment) {
            return self.write_tokens(tokens);
        }
        self.copy_to(parts[0][0].start);
        let names: Vec<&str> = parts.iter().map(|part| self.text(part[0])).collect();
        let _ = write!(self.out, "({}) = (", names.join(", "));
        for (at, part) in parts.iter().enumerate() {
            let value = &part[2..];
            if at > 0 {
                self.out.push_str(", ");
            }
            // Line numbers stay true.
            let lines = self.source[self.at..value[0].start].matches('\n').count();
            self.out.push_str(&"\n".repeat(lines));
            self.at = value[0].start;
            self.write_tokens(value);
            self.copy_to(value[value.len() - 1].end);
        }
        self.out.push(')');
    }

    /// Writes `set …`, with a value that is taken apart made a list. Returns whether there is a value.
    fn set(&mut self, tokens: &[Token]) -> bool {
        let mut depth = 0;
        let sign = |token: &Token| {
            depth = deeper(depth, *token);
            depth == 0 && token.kind == Kind::Sign(b'=')
        };
        let Some(at) = tokens.iter().position(sign) else {
            self.write_tokens(tokens);
            return false;
        };
        let (targets, value) = (&tokens[..at], &tokens[at + 1..]);
        let (Some(first), Some(last)) = (value.first(), value.last()) else {
            self.write_tokens(tokens);
            return true;
        };
        if split(targets, b',').len() == 1 || split(value, b',').len() > 1 {
            self.write_tokens(tokens);
            return true;
        }
        self.write_tokens(&tokens[..=at]);
        self.copy_to(first.start);
        self.out.push('(');
        self.write_tokens(value);
        self.copy_to(last.end);
        let _ = write!(self.out, ")|{EACH}");
        true
    }

    fn macro_start(&mut self, tokens: &[Token], end: usize) {
        let name = tokens.get(1).map_or("", |&name| self.text(name)).to_owned();
        let header = tokens.get(3..tokens.len() - 1).unwrap_or_default();
        self.write_tokens(&tokens[..tokens.len().min(3)]);
        let mut parameters: Vec<String> = Vec::new();
        let mut moved: Vec<(String, &[Token])> = Vec::new();
        for part in split(header, b',') {
            let Some((&parameter, rest)) = part.split_first() else {
                continue;
            };
            let default = rest.get(1..).unwrap_or_default();
            let own = |token: &Token| {
                token.kind == Kind::Name
                    && parameters.iter().any(|known| known == self.text(*token))
            };
            let parameter = self.text(parameter).to_owned();
            if default.iter().any(own) {
                let last = default[default.len() - 1];
                self.replace(default[0].start, last.end, "__undefined");
                moved.push((parameter.clone(), default));
            } else {
                self.write_tokens(part);
            }
            parameters.push(parameter);
        }
        self.copy_to(tokens.last().map_or(end, |close| close.start));
        self.macros.push(OpenMacro {
            name,
            parameters,
            more: self.out.len(),
            varargs: false,
            kwargs: false,
            caller: false,
        });
        if !moved.is_empty() {
            self.copy_to(self.close(end));
            for (parameter, default) in moved {
                let _ = write!(
                    self.out,
                    "%}}{{% if {parameter} is undefined %}}{{% set {parameter} = "
                );
                // Written again, from its place in the header.
                let at = std::mem::replace(&mut self.at, default[0].start);
                self.write_tokens(default);
                self.copy_to(default[default.len() - 1].end);
                self.at = at;
                self.out.push_str(" %}{% endif ");
            }
        }
        self.copy_to(end);
    }

    /// Where the end of a statement begins, with its whitespace control.
    fn close(&self, end: usize) -> usize {
        let control = matches!(self.source.as_bytes()[end - 3], b'-' | b'+');
        end - 2 - usize::from(control)
    }

    fn macro_end(&mut self, end: usize) {
        let Some(open) = self.macros.pop() else {
            return self.copy_to(end);
        };
        if !open.varargs && !open.kwargs {
            return self.copy_to(end);
        }
        let mut more = String::new();
        for name in ["varargs", "kwargs"] {
            let comma = if more.is_empty() && open.parameters.is_empty() {
                ""
            } else {
                ", "
            };
            // A macro may have a parameter of that name.
            if !open.parameters.iter().any(|parameter| parameter == name) {
                let _ = write!(more, "{comma}{name}=none");
            }
        }
        self.out.insert_str(open.more, &more);
        // The statement's end and its whitespace control go to the last of the two.
        self.copy_to(self.close(end));
        let names = open.parameters.join("', '");
        let names = if names.is_empty() {
            "[]".to_owned()
        } else {
            format!("['{names}']")
        };
        let (name, varargs, kwargs, caller) = (open.name, open.varargs, open.kwargs, open.caller);
        let _ = write!(
            self.out,
            "%}}{{% set {name} = {VARIADIC}({name}, {names}, {varargs}, {kwargs}, {caller}) "
        );
        self.copy_to(end);
    }

    /// Copies `tokens`, rewritten, and notes what a macro's body names.
    fn write_tokens(&mut self, tokens: &[Token]) {
        let mut products = Products::default();
        let mut at = 0;
        while at < tokens.len() {
            let token = tokens[at];
            let behind = at.checked_sub(1).map(|before| tokens[before]);
            let is_dot =
                |at: Option<usize>| at.is_some_and(|at| tokens[at].kind == Kind::Sign(b'.'));
            let is_member = is_dot(at.checked_sub(1));
            let ends_value = behind.is_some_and(|token| {
                token.kind == Kind::Number || self.is_value(token) || is_dot(at.checked_sub(2))
            });
            if is_member || !products.end_at(self.text(token), token.kind, ends_value) {
                products.go_on(self, token);
            }
            match token.kind {
                Kind::Text => self.string(token),
                Kind::Name if !is_member => self.note_macro_word(token),
                Kind::Sign(b'+') if !ends_value => self.replace(token.start, token.end, ""),
                Kind::Sign(b'-') if !ends_value => self.negative_truth(tokens.get(at + 1)),
                Kind::Sign(b'[') if behind.is_some_and(|token| self.is_value(token)) => {
                    if let Some(len) = self.slice(&tokens[at..]) {
                        products.close();
                        at += len;
                        continue;
                    }
                }
                Kind::Sign(b'%') if ends_value => {
                    if let (Some(start), Some(len)) =
                        (products.start, operand(&tokens[at + 1..], self.source))
                    {
                        self.modulo(start, token, &tokens[at + 1..=at + len]);
                        at += len;
                    }
                }
                _ => {}
            }
            at += 1;
        }
    }

    /// Writes a string as the engine reads it.
    fn string(&mut self, token: Token) {
        if !self.text(token).contains('\\') {
            return;
        }
        match literal::rewritten(self.text(token)) {
            Ok(text) => self.replace(token.start, token.end, &text),
            Err(message) => {
                let error = self.error(token.start, &message);
                self.wrong.get_or_insert(error);
            }
        }
    }

    /// Writes a truth value behind a sign as a number: the engine has no negative truth values.
    fn negative_truth(&mut self, token: Option<&Token>) {
        let Some(&token) = token else {
            return;
        };
        match self.text(token) {
            "true" | "True" => self.replace(token.start, token.end, "1"),
            "false" | "False" => self.replace(token.start, token.end, "0"),
            _ => {}
        }
    }

    /// Notes a word that gives the macro around it more parameters.
    fn note_macro_word(&mut self, token: Token) {
        if let Some(open) = self.macros.last_mut() {
            match &self.source[token.start..token.end] {
                "varargs" => open.varargs = true,
                "kwargs" => open.kwargs = true,
                "caller" => open.caller = true,
                _ => {}
            }
        }
    }

    /// Writes the brackets that `tokens` begin with, if they hold a slice. Returns the number of their tokens.
    fn slice(&mut self, tokens: &[Token]) -> Option<usize> {
        let inner = inside(tokens)?;
        let parts = split(inner, b':');
        if parts.len() == 1 {
            return None;
        }
        self.replace(tokens[0].start, tokens[0].end, ".");
        self.out.push_str(SLICE);
        self.out.push('(');
        for (place, part) in parts.iter().enumerate() {
            let Some(last) = part.last() else {
                self.out.push_str(if place > 0 { ", none" } else { "none" });
                continue;
            };
            if place > 0 {
                self.out.push_str(", ");
            }
            self.at = part[0].start;
            self.write_tokens(part);
            self.copy_to(last.end);
        }
        self.out.push(')');
        let len = inner.len() + 2;
        self.at = tokens[len - 1].end;
        Some(len)
    }

    /// Writes `x % operand` as a call of [`PERCENT`]; the output has `x` from `start` on.
    fn modulo(&mut self, start: usize, sign: Token, operand: &[Token]) {
        self.copy_to(sign.start);
        self.out.insert(start, '(');
        self.replace(sign.start, sign.end, ")|");
        self.out.push_str(PERCENT);
        self.out.push('(');
        self.write_tokens(operand);
        self.copy_to(operand[operand.len() - 1].end);
        self.out.push(')');
    }
}

/// Where products begin in the output: operands of `*`, `/`, `%` and of what binds more strongly.
#[derive(Default)]
struct Products {
    /// Start of the product that goes on; `None` where another one begins.
    start: Option<usize>,
    /// Products around open brackets.
    around: Vec<Option<usize>>,
}

impl Products {
    /// Ends the product at a token that binds less; `is_behind` a value. Returns whether it did.
    fn end_at(&mut self, text: &str, kind: Kind, is_behind: bool) -> bool {
        const WORDS: [&str; 10] = [
            "in",
            "not",
            "and",
            "or",
            "if",
            "elif",
            "else",
            "recursive",
            "for",
            "autoescape",
        ];
        let ends = match kind {
            Kind::Sign(b'+' | b'-') => is_behind,
            Kind::Sign(sign) => b"~,:=!<>".contains(&sign),
            Kind::Name => WORDS.contains(&text),
            Kind::Text | Kind::Number => false,
        };
        if ends {
            self.start = None;
        }
        ends
    }

    /// Goes on with `token`, which is part of the product.
    fn go_on(&mut self, writer: &mut Writer<'_>, token: Token) {
        if let Kind::Sign(b')' | b']' | b'}') = token.kind {
            return self.close();
        }
        if self.start.is_none() {
            writer.copy_to(token.start);
            self.start = Some(writer.out.len());
        }
        if let Kind::Sign(b'(' | b'[' | b'{') = token.kind {
            self.around.push(self.start.take());
        }
    }

    /// Goes on behind a closing bracket.
    fn close(&mut self) {
        self.start = self.around.pop().flatten();
    }
}

/// Bytes of the number that `bytes` begin with; `may_be_real`: with a fraction and an exponent.
fn number_len(bytes: &[u8], may_be_real: bool) -> usize {
    let digits = |from: usize| {
        let part = |b: &&u8| b.is_ascii_alphanumeric() || **b == b'_';
        bytes[from..].iter().take_while(part).count()
    };
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut len = digits(0);
    if !may_be_real || bytes[..len].starts_with(b"0x") || bytes[..len].starts_with(b"0X") {
        return len;
    }
    if bytes.get(len) == Some(&b'.') && is_digit(len + 1) {
        len += 1 + digits(len + 1);
    }
    if matches!(bytes[len - 1], b'e' | b'E')
        && matches!(bytes.get(len), Some(b'+' | b'-'))
        && is_digit(len + 1)
    {
        len += 1 + digits(len + 1);
    }
    len
}

/// The tokens between the bracket that `tokens` begin with and its end.
fn inside(tokens: &[Token]) -> Option<&[Token]> {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        depth = deeper(depth, *token);
        if depth == 0 {
            return tokens.get(1..at);
        }
    }
    None
}

/// The depth in brackets behind `token`.
fn deeper(depth: usize, token: Token) -> usize {
    match token.kind {
        Kind::Sign(b'(' | b'[' | b'{') => depth + 1,
        Kind::Sign(b')' | b']' | b'}') => depth.saturating_sub(1),
        _ => depth,
    }
}

/// Parts of `tokens` between the signs `at` outside of brackets.
fn split(tokens: &[Token], at: u8) -> Vec<&[Token]> {
    let mut depth = 0;
    tokens
        .split(|token| {
            depth = deeper(depth, *token);
            depth == 0 && token.kind == Kind::Sign(at)
        })
        .collect()
}

/// Number of tokens of the operand that `tokens` begin with: a power, or a value with the calls, filters and tests applied to
/// it.
fn operand(tokens: &[Token], source: &str) -> Option<usize> {
    let mut len = factor(tokens, source)?;
    while let [star, also, rest @ ..] = &tokens[len..]
        && [star.kind, also.kind] == [Kind::Sign(b'*'); 2]
    {
        len += 2 + factor(rest, source)?;
    }
    Some(len)
}

/// Number of tokens of a value with its calls, filters and tests.
fn factor(tokens: &[Token], source: &str) -> Option<usize> {
    let group = |at: usize| inside(&tokens[at..]).map(|inside| at + inside.len() + 2);
    let kind = |at: usize| tokens.get(at).map(|token| token.kind);
    let word = |at: usize| {
        tokens
            .get(at)
            .map_or("", |token| &source[token.start..token.end])
    };
    let mut at = 0;
    if let Some(Kind::Sign(b'-' | b'+')) = kind(at) {
        at += 1;
    }
    match kind(at)? {
        Kind::Name if word(at) == "not" => return None,
        Kind::Name | Kind::Text | Kind::Number => at += 1,
        Kind::Sign(b'(' | b'[' | b'{') => at = group(at)?,
        Kind::Sign(_) => return None,
    }
    loop {
        match kind(at) {
            Some(Kind::Sign(b'(' | b'[')) => at = group(at)?,
            Some(Kind::Sign(b'.' | b'|'))
                if matches!(kind(at + 1), Some(Kind::Name | Kind::Number)) =>
            {
                at += 2;
            }
            // A test binds more strongly too, with an argument that needs no brackets.
            Some(Kind::Name) if word(at) == "is" => {
                at += if word(at + 1) == "not" { 3 } else { 2 };
                let joins = ["and", "or", "is", "not", "if", "else", "in"].contains(&word(at));
                match kind(at) {
                    Some(Kind::Name | Kind::Text | Kind::Number) if !joins => at += 1,
                    Some(Kind::Sign(b'[' | b'{')) => at = group(at)?,
                    _ => {}
                }
            }
            _ => return Some(at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_engine_lacks_is_rewritten() {
        for same in [
            "",
            "a { b } {{ 'generation' }} {# {% generation %} #}",
            "{% raw %}{% generation %}{{ '%}' }}{%- endraw -%} x",
            "{{ '{% generation %}' ~ \"\\\"%}\" }}{% if generation %}{% endif %}",
            "{% macro f(a, b=[1, 2]) %}{{ a.kwargs }}{% endmacro %}",
            "{{ {'a': {}}['a'] }}{% with a = 1 %}{% endwith %}{% with %}{% endwith %}{% endset %}",
            "{{ open",
        ] {
            assert_eq!(rewrite(same).unwrap(), same);
        }
        for (source, expected) in [
            (
                "{%- generation -%}\r\nx{%+endgeneration+%}",
                "{%- with -%}\nx{%+endwith+%}",
            ),
            (
                "{% macro f(a, b=(1, 2)) %}{{ varargs }}{%- endmacro -%}\n",
                "{% macro f(a, b=(1, 2), varargs=none, kwargs=none) %}{{ varargs }}{%- endmacro %}\
                 {% set f = __variadic(f, ['a', 'b'], true, false, false) -%}\n",
            ),
            (
                "{% macro f() %}{{ kwargs }}{{ caller() }}{% endmacro %}",
                "{% macro f(varargs=none, kwargs=none) %}{{ kwargs }}{{ caller() }}{% endmacro %}\
                 {% set f = __variadic(f, [], false, true, true) %}",
            ),
            (
                "{{ x[1:][-1] + y.z()[:'a'[1:]:-1] }}{{ [a if b else c][0] }}{{ {'a': 1}['a'] }}",
                "{{ x.__slice(1, none)[-1] + y.z().__slice(none, 'a'.__slice(1, none), -1) }}\
                 {{ [a if b else c][0] }}{{ {'a': 1}['a'] }}",
            ),
            (
                "{% macro f(a, b=a[1:], c='%d' % 3) -%} {% endmacro %}",
                "{% macro f(a, b=__undefined, c=('%d' )|__percent( 3)) %}{% if b is undefined %}\
                 {% set b = a.__slice(1, none) %}{% endif -%} {% endmacro %}",
            ),
            (
                "{%- for a, b in c.d if a in b recursive -%}{% for x in y|z %}",
                "{%- for a, b in (c.d)|__each if a in b recursive -%}{% for x in (y|z)|__each %}",
            ),
            (
                r#"{{ -true - true ~ '<\/a>' ~ "\x41\"'" }}{% set a, b = '\101\n' %}{{+ x + +1 }}{% if + x %}"#,
                "{{ -1 - true ~ '<\\\\/a>' ~ \"A\\\"'\" }}{% set a, b = ('A\n')|__each %}{{ x + 1 }}{% if  x %}",
            ),
            (
                "{{ '%d%%' % x.y[0]|int ~ 'a' }}",
                "{{ ('%d%%' )|__percent( x.y[0]|int) ~ 'a' }}",
            ),
            (
                "{{ 1.5e-7 % 0.5 - 0x1e-7 % 2 }}{{ x.0.5 % 2 }}",
                "{{ (1.5e-7 )|__percent( 0.5) - 0x1e-(7 )|__percent( 2) }}{{ (x.0.5 )|__percent( 2) }}",
            ),
            (
                "{{ a % b }}{{ -a * b % c ** -2 % d + e % (f % g) }}{{ x % not y }}{% if a.if % 2 == 1 and b|f % 2 %}",
                "{{ (a )|__percent( b) }}{{ ((-a * b )|__percent( c ** -2) )|__percent( d) + (e )|__percent( ((f )|__percent( g))) }}\
                 {{ x % not y }}{% if (a.if )|__percent( 2) == 1 and (b|f )|__percent( 2) %}",
            ),
            (
                "{%- set x -%} {% set y | f(a=1) %}{% endset %} {%- endset %}{% filter f -%}{%+ endfilter +%}",
                "{%- set x %}{% with -%} {% set y | f(a=1) %}{% with %}{% endwith %}{% endset %} {%- endwith %}{% endset %}\
                 {% filter f %}{% with -%}{%+ endwith %}{% endfilter +%}",
            ),
            (
                "{%- with a = 1,\nb = (a, 2) % 3 -%}",
                "{%- with (a, b) = (1, \n((a, 2) )|__percent( 3)) -%}",
            ),
        ] {
            assert_eq!(rewrite(source).unwrap(), expected);
        }
    }

    #[test]
    fn a_wrong_statement_is_named_with_its_line() {
        for (source, line, part) in [
            ("a\n{% generation %}\n", 2, "no `endgeneration`"),
            ("\n\n{% endgeneration %}", 3, "without `generation`"),
            ("{% include 'x' %}", 1, "`include` is not a statement"),
        ] {
            let error = rewrite(source).unwrap_err();
            assert_eq!(error.line, line);
            assert!(error.message.contains(part), "{error:?}");
        }
    }
}
