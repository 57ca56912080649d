//! Formats numbers in sentences, and escapes foreign text for a terminal or a log.

use std::borrow::Cow;
use std::fmt::Write as _;

/// A count with thousands separated by commas: `1,234,567`.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A count with its noun: `1 request`, `2,000 requests`, `0 switches`.
///
/// `one` is the singular, whose last word takes the ending: `s`, `es` after a hiss, `ies` for a `y`
/// that follows a consonant.
pub fn counted(value: u64, one: &str) -> String {
    format!("{} {}", grouped(value), several(value, one))
}

/// The noun of [`counted`] alone, for a count that is printed elsewhere.
pub fn several(value: u64, one: &str) -> String {
    if value == 1 {
        return one.to_owned();
    }
    if ["s", "x", "z", "ch", "sh"]
        .iter()
        .any(|end| one.ends_with(end))
    {
        return format!("{one}es");
    }
    match one.strip_suffix('y') {
        Some(stem) if !stem.ends_with(['a', 'e', 'i', 'o', 'u']) => format!("{stem}ies"),
        _ => format!("{one}s"),
    }
}

/// Escapes `text` of a server, a peer or a file for one line of a terminal or a log: control characters (so line breaks
/// and terminal sequences too), bidirectional marks, and invisible characters.
pub fn foreign(text: &str) -> Cow<'_, str> {
    escaped(text, acts)
}

/// As [`foreign`], but keeps line feeds and tabs, for a text of several lines.
pub fn foreign_lines(text: &str) -> Cow<'_, str> {
    escaped(text, |c| acts(c) && c != '\n' && c != '\t')
}

/// As [`foreign`], of at most `chars_max` characters; `…` stands for the rest.
pub fn brief(text: &str, chars_max: usize) -> Cow<'_, str> {
    let shown = foreign(text);
    match end_of(&shown, chars_max) {
        None => shown,
        Some(end) => Cow::Owned(format!("{}…", &shown[..end])),
    }
}

/// As [`foreign_lines`], of at most `chars_max` characters per line.
pub fn brief_lines(text: &str, chars_max: usize) -> String {
    let mut out = String::with_capacity(text.len().min(4 * chars_max));
    for (at, line) in foreign_lines(text).split('\n').enumerate() {
        if at > 0 {
            out.push('\n');
        }
        match end_of(line, chars_max) {
            None => out.push_str(line),
            Some(end) => out.extend([&line[..end], "…"]),
        }
    }
    out
}

/// Bytes of the first `chars_max` characters, if there are more.
fn end_of(text: &str, chars_max: usize) -> Option<usize> {
    text.char_indices().nth(chars_max).map(|(end, _)| end)
}

/// JSON `text` in which a terminal acts on no character but line feeds: what [`foreign`] escapes stands as `\uXXXX`.
pub fn foreign_json(text: &str) -> Cow<'_, str> {
    // Outside of strings JSON has no such characters, and inside of them any may be escaped.
    let acts = |c: char| acts(c) && c != '\n';
    let Some(first) = text.find(acts) else {
        return Cow::Borrowed(text);
    };
    let mut out = text[..first].to_owned();
    for c in text[first..].chars() {
        if acts(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

fn escaped(text: &str, acts: impl Fn(char) -> bool) -> Cow<'_, str> {
    let Some(first) = text.find(&acts) else {
        return Cow::Borrowed(text);
    };
    let mut out = String::with_capacity(text.len() + 16);
    out.push_str(&text[..first]);
    for c in text[first..].chars() {
        if acts(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// Whether a terminal or a viewer acts on `c` instead of showing it.
pub fn acts(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            // Arabic letter mark; zero-width characters and directional marks; line and paragraph separators,
            // embeddings, overrides; joiners that show nothing, isolates; byte order mark; annotations; tags.
            '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
                | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_is_escaped_and_the_rest_is_kept() {
        for (text, shown) in [
            ("plain äö 漢字 🙂", "plain äö 漢字 🙂"),
            (
                "\x1b[31mred\x1b]0;title\x07",
                "\\u{1b}[31mred\\u{1b}]0;title\\u{7}",
            ),
            ("one\r\ntwo\tthree", "one\\r\\ntwo\\tthree"),
            ("\u{9b}31m\u{7f}", "\\u{9b}31m\\u{7f}"),
            (
                "a\u{202e}b\u{2066}c\u{200b}\u{feff}",
                "a\\u{202e}b\\u{2066}c\\u{200b}\\u{feff}",
            ),
            ("e\u{301}", "e\u{301}"),
        ] {
            assert_eq!(foreign(text), shown);
        }
        assert_eq!(foreign_lines("a\n\tb\r\x1b"), "a\n\tb\\r\\u{1b}");
        assert!(matches!(foreign("borrowed"), Cow::Borrowed(_)));
    }

    #[test]
    fn no_character_acts_behind_it() {
        for c in (0..=u32::from(char::MAX)).filter_map(char::from_u32) {
            let text = c.to_string();
            let shown = foreign(&text);
            assert!(!shown.chars().any(acts), "{c:?}");
            assert!(shown == text || shown.is_ascii(), "{c:?}");
        }
    }

    #[test]
    fn a_brief_text_has_an_end() {
        assert_eq!(brief("abc", 3), "abc");
        assert_eq!(brief("ab\x1bc", 3), "ab\\…");
        assert_eq!(brief(&"é".repeat(100), 2), "éé…");
        assert_eq!(brief_lines("abc\n\tab\r\n", 3), "abc\n\tab…\n");
    }

    #[test]
    fn json_is_the_same_without_what_acts() {
        for c in (0..=u32::from(char::MAX)).filter_map(char::from_u32) {
            let json = format!("{{\n\"{}\": 1}}", c.escape_debug());
            let json = if acts(c) && !c.is_ascii_control() {
                format!("{{\n\"{c}\": 1}}")
            } else {
                json
            };
            let shown = foreign_json(&json);
            assert!(!shown.chars().any(|c| acts(c) && c != '\n'), "{c:?}");
            if acts(c) && !c.is_ascii_control() {
                let units = c
                    .encode_utf16(&mut [0; 2])
                    .iter()
                    .fold(String::new(), |units, unit| format!("{units}\\u{unit:04x}"));
                assert_eq!(shown, format!("{{\n\"{units}\": 1}}"));
            }
        }
    }

    #[test]
    fn one_is_one_and_others_are_several() {
        for (value, one, text) in [
            (1, "shard", "1 shard"),
            (0, "shard", "0 shards"),
            (2, "switch", "2 switches"),
            (1, "switch", "1 switch"),
            (3, "pass", "3 passes"),
            (12_345, "request", "12,345 requests"),
            (2, "entry", "2 entries"),
            (2, "key", "2 keys"),
            (2, "trace line", "2 trace lines"),
            (1_000_000, "GPU", "1,000,000 GPUs"),
        ] {
            assert_eq!(counted(value, one), text);
        }
    }
}
