//! Texts that match a regular expression.

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, Hir, HirKind, Look};
use slipstream_base::width::to_u32;

use crate::Rng;

/// Bytes of a pattern at most.
const PATTERN_BYTES_MAX: usize = 4 << 10;
/// Characters of a generated text at most.
const CHARS_MAX: usize = 2 << 10;
/// Repetitions beyond the least number, at most.
const MORE_MAX: u32 = 3;
/// Nodes that are generated for a text at most: repetitions of repetitions grow fast.
const NODES_MAX: u32 = 4 << 10;

/// A text that matches `pattern`.
///
/// A pattern may match anywhere in a text, as in JSON Schema, so the text is one of its matches.
///
/// # Errors
/// The reason, if the pattern is no regular expression, or needs more than one can do without a search
/// (look-around, back references, word boundaries), or makes a text that is too long.
pub(crate) fn matching(pattern: &str, rng: &mut Rng) -> Result<String, String> {
    let hir = parse(pattern)?;
    let mut text = Text {
        out: String::new(),
        chars: 0,
        nodes: 0,
        ended: false,
        rng,
    };
    text.node(&hir)?;
    Ok(text.out)
}

/// The syntax tree of `pattern`.
///
/// # Errors
/// The reason, if it is too long or no regular expression.
pub(crate) fn parse(pattern: &str) -> Result<Hir, String> {
    if pattern.len() > PATTERN_BYTES_MAX {
        return Err(format!(
            "has {} bytes; at most {PATTERN_BYTES_MAX} are taken",
            pattern.len()
        ));
    }
    let parsed = ParserBuilder::new()
        .nest_limit(64)
        // `\d` and `\w` are ASCII's, as in JavaScript, whose expressions JSON Schema names.
        .unicode(false)
        .utf8(false)
        .build()
        .parse(pattern);
    parsed.map_err(|error| {
        let text = error.to_string();
        let last = text.lines().last().unwrap_or_default();
        format!("cannot be modelled: {}", last.trim_start_matches("error: "))
    })
}

struct Text<'a> {
    out: String,
    chars: usize,
    nodes: u32,
    /// Past an assertion of the end.
    ended: bool,
    rng: &'a mut Rng,
}

impl Text<'_> {
    fn push(&mut self, c: char) -> Result<(), String> {
        if self.ended {
            return Err("cannot be modelled: something follows `$`".into());
        }
        self.chars += 1;
        if self.chars > CHARS_MAX {
            return Err(format!("makes a text of more than {CHARS_MAX} characters"));
        }
        self.out.push(c);
        Ok(())
    }

    fn node(&mut self, hir: &Hir) -> Result<(), String> {
        self.nodes += 1;
        if self.nodes > NODES_MAX {
            return Err("repeats too much".into());
        }
        match hir.kind() {
            HirKind::Empty => Ok(()),
            HirKind::Literal(literal) => {
                let text = std::str::from_utf8(&literal.0)
                    .map_err(|_| "matches bytes that are no text".to_owned())?;
                text.chars().try_for_each(|c| self.push(c))
            }
            HirKind::Class(class) => {
                let c = self.member(class)?;
                self.push(c)
            }
            HirKind::Look(Look::Start) if self.out.is_empty() => Ok(()),
            HirKind::Look(Look::End) => {
                self.ended = true;
                Ok(())
            }
            HirKind::Look(_) => {
                Err("cannot be modelled: it asserts something inside of the text".into())
            }
            HirKind::Repetition(repetition) => {
                let least = repetition.min;
                let most = repetition.max.unwrap_or(u32::MAX);
                let most = most.min(least.saturating_add(MORE_MAX));
                let count = least + to_u32(self.rng.below(u64::from(most - least) + 1));
                (0..count).try_for_each(|_| self.node(&repetition.sub))
            }
            HirKind::Capture(capture) => self.node(&capture.sub),
            HirKind::Concat(parts) => parts.iter().try_for_each(|part| self.node(part)),
            HirKind::Alternation(parts) => {
                let chosen = self.rng.index(parts.len());
                self.node(&parts[chosen])
            }
        }
    }

    /// A character of `class`; a letter, a digit or another printable one of ASCII if there is one.
    fn member(&mut self, class: &Class) -> Result<char, String> {
        let ranges: Vec<(char, char)> = match class {
            Class::Unicode(class) => class.iter().map(|r| (r.start(), r.end())).collect(),
            Class::Bytes(class) => class
                .iter()
                .filter(|r| r.start().is_ascii())
                .map(|r| (r.start().into(), r.end().min(0x7f).into()))
                .collect(),
        };
        let within = |low: char, high: char| -> Vec<(char, char)> {
            let clipped = ranges.iter().map(|&(a, b)| (a.max(low), b.min(high)));
            clipped.filter(|(a, b)| a <= b).collect()
        };
        let choices = [
            within('a', 'z'),
            within('A', 'Z'),
            within('0', '9'),
            within(' ', '~'),
            ranges.clone(),
        ];
        // Letters and digits alike, then the rest.
        let alnum: Vec<_> = choices[..3].iter().flatten().copied().collect();
        let choices = [alnum, choices[3].clone(), choices[4].clone()];
        let Some(some) = choices.into_iter().find(|ranges| !ranges.is_empty()) else {
            return Err("matches no character".into());
        };
        let (low, high) = some[self.rng.index(some.len())];
        let count = u64::from(high) - u64::from(low) + 1;
        let drawn = u32::from(low) + to_u32(self.rng.below(count));
        // Only the gap of the surrogates has no characters.
        Ok(char::from_u32(drawn).unwrap_or(low))
    }
}
