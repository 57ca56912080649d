//! Methods of Python's strings.

use minijinja::value::Tuple;
use minijinja::{Error, ErrorKind, Value};

use super::args::Args;
use super::methods::{bounds, failed};
use super::{filters, format, python};

/// Limit of texts that a template makes by padding (characters), repeating or replacing (bytes).
pub(crate) const TEXT_MAX: usize = 64 << 20;

/// Error of a text longer than [`TEXT_MAX`].
pub(crate) fn too_long() -> Error {
    failed("the text becomes too long")
}

/// The part of `text` from character `start` to `end`, with the bytes before it. `None` if it begins
/// behind the end, where not even nothing is found.
fn part(text: &str, start: usize, end: usize) -> Option<(usize, &str)> {
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(at, _)| at);
    if start > text.chars().count() || start > end {
        return None;
    }
    let from = byte(start);
    Some((from, &text[from..byte(end).max(from)]))
}

/// Calls `method` of `text`.
pub(super) fn call(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    if method == "format" {
        return format::str_format(text, args).map(Value::from);
    }
    let mut args = Args::new(args, method)?;
    let result = if let Some(holds) = predicate(method) {
        Value::from(holds(text))
    } else if let Some(change) = change_of_case(method) {
        Value::from(change(text))
    } else {
        with_arguments(text, method, &mut args)?
    };
    args.finish()?;
    Ok(result)
}

/// The methods that answer whether a text is of some kind.
fn predicate(method: &str) -> Option<fn(&str) -> bool> {
    fn all(text: &str, holds: impl Fn(char) -> bool) -> bool {
        !text.is_empty() && text.chars().all(holds)
    }
    Some(match method {
        "islower" => |text| cased(text, char::is_lowercase, char::is_uppercase),
        "isupper" => |text| cased(text, char::is_uppercase, char::is_lowercase),
        "istitle" => is_title,
        "isspace" => |text| all(text, python::is_space),
        "isdigit" => |text| all(text, is_digit),
        "isdecimal" => |text| all(text, |c| c.is_ascii_digit() || is_decimal(c)),
        "isnumeric" => |text| all(text, char::is_numeric),
        "isalpha" => |text| all(text, is_letter),
        "isalnum" => |text| all(text, |c| is_letter(c) || c.is_numeric()),
        "isascii" => str::is_ascii,
        "isprintable" => |text| text.chars().all(python::is_printable),
        "isidentifier" => is_identifier,
        _ => return None,
    })
}

/// The methods that change the case of letters.
fn change_of_case(method: &str) -> Option<fn(&str) -> String> {
    Some(match method {
        "upper" => str::to_uppercase,
        "lower" => str::to_lowercase,
        "casefold" => |text| text.to_lowercase().replace('ß', "ss"),
        "capitalize" => filters::capitalized,
        "title" => title,
        "swapcase" => swap_case,
        _ => return None,
    })
}

/// Calls a method that has arguments.
fn with_arguments(text: &str, method: &str, args: &mut Args<'_>) -> Result<Value, Error> {
    match method {
        "strip" | "lstrip" | "rstrip" => {
            let chars = args.optional_text("chars")?;
            let (left, right) = (method != "rstrip", method != "lstrip");
            Ok(Value::from(strip(text, chars.as_deref(), left, right)))
        }
        "removeprefix" => {
            let prefix = args.text("prefix")?;
            Ok(Value::from(text.strip_prefix(&*prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let suffix = args.text("suffix")?;
            Ok(Value::from(text.strip_suffix(&*suffix).unwrap_or(text)))
        }
        "replace" => {
            let (old, new) = (args.text("old")?, args.text("new")?);
            let count = args.optional_whole("count")?.unwrap_or(-1);
            replace(text, &old, &new, count).map(Value::from)
        }
        "startswith" => affixed(text, method, args, |part, fix| part.starts_with(fix)),
        "endswith" => affixed(text, method, args, |part, fix| part.ends_with(fix)),
        "count" => {
            let wanted = args.text("sub")?;
            let (start, end) = bounds(args, text.chars().count())?;
            let count = |(_, part): (usize, &str)| part.matches(&*wanted).count();
            Ok(Value::from(part(text, start, end).map_or(0, count)))
        }
        "find" | "index" => found(text, method, args, |part, wanted| part.find(wanted)),
        "rfind" | "rindex" => found(text, method, args, |part, wanted| part.rfind(wanted)),
        "split" | "rsplit" => {
            let separator = args.optional_text("sep")?;
            let most = args.optional_whole("maxsplit")?.unwrap_or(-1);
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            split(text, separator.as_deref(), most, method == "rsplit")
        }
        "splitlines" => {
            let keep = args.flag("keepends");
            Ok(lines(text, keep).into_iter().map(Value::from).collect())
        }
        "partition" | "rpartition" => partition(text, &args.text("sep")?, method == "rpartition"),
        "join" => join(text, &args.need("iterable")?),
        "ljust" | "rjust" | "center" => {
            let width = args.whole("width")?;
            let fill = args.optional_text("fillchar")?;
            let fill = fill.as_deref().unwrap_or(" ");
            if fill.chars().count() != 1 {
                return Err(failed(
                    "the fill character must be exactly one character long",
                ));
            }
            pad(text, width, fill, method).map(Value::from)
        }
        "zfill" => zero_fill(text, args.whole("width")?).map(Value::from),
        "expandtabs" => {
            let size = args.optional_whole("tabsize")?.unwrap_or(8);
            expand_tabs(text, size).map(Value::from)
        }
        _ => Err(ErrorKind::UnknownMethod.into()),
    }
}

/// `startswith` and `endswith`: of one text or one of a tuple, in a part.
fn affixed(
    text: &str,
    method: &str,
    args: &mut Args<'_>,
    has: fn(&str, &str) -> bool,
) -> Result<Value, Error> {
    let fixes = args.need("prefix")?;
    let (start, end) = bounds(args, text.chars().count())?;
    let part = part(text, start, end);
    let holds = |fix: &Value| -> Result<bool, Error> {
        let wrong = || failed(format!("{method}() takes a string or a tuple of strings"));
        let fix = fix.as_str().ok_or_else(wrong)?;
        Ok(part.is_some_and(|(_, part)| has(part, fix)))
    };
    if !fixes.is_tuple() {
        return holds(&fixes).map(Value::from);
    }
    let mut found = false;
    for fix in fixes.try_iter()? {
        found |= holds(&fix)?;
    }
    Ok(Value::from(found))
}

/// `find`, `index` and the same from the right: a place in characters.
fn found(
    text: &str,
    method: &str,
    args: &mut Args<'_>,
    find: fn(&str, &str) -> Option<usize>,
) -> Result<Value, Error> {
    let wanted = args.text("sub")?;
    let (start, end) = bounds(args, text.chars().count())?;
    let found = part(text, start, end).and_then(|(from, part)| {
        let at = find(part, &wanted)?;
        Some(text[..from + at].chars().count())
    });
    match found {
        Some(at) => Ok(Value::from(at)),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(failed("substring not found")),
    }
}

fn partition(text: &str, separator: &str, right: bool) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(failed("empty separator"));
    }
    let cut = if right {
        text.rsplit_once(separator)
    } else {
        text.split_once(separator)
    };
    let parts = match cut {
        Some((before, behind)) => [before, separator, behind],
        None if right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::new(
        parts.into_iter().map(Value::from).collect(),
    )))
}

fn join(separator: &str, list: &Value) -> Result<Value, Error> {
    let mut out = String::new();
    for (at, element) in list.try_iter()?.enumerate() {
        let Some(element) = element.as_str() else {
            let kind = element.kind();
            return Err(failed(format!(
                "join(): element {at} must be a string, not {kind}"
            )));
        };
        if at > 0 {
            out.push_str(separator);
        }
        out.push_str(element);
    }
    Ok(Value::from(out))
}

/// Fills a number with zeros behind its sign.
fn zero_fill(text: &str, width: i64) -> Result<String, Error> {
    let (sign, digits) = match text.strip_prefix(['+', '-']) {
        Some(digits) => (&text[..1], digits),
        None => ("", text),
    };
    let width = width.saturating_sub(i64::from(!sign.is_empty()));
    Ok(format!("{sign}{}", pad(digits, width, "0", "rjust")?))
}

fn swap_case(text: &str) -> String {
    text.chars().fold(String::new(), |mut out, c| {
        if c.is_uppercase() {
            out.extend(c.to_lowercase());
        } else if c.is_lowercase() {
            out.extend(c.to_uppercase());
        } else {
            out.push(c);
        }
        out
    })
}

fn is_identifier(text: &str) -> bool {
    let mut chars = text.chars();
    let first = chars.next().is_some_and(|c| c == '_' || is_letter(c));
    first && chars.all(|c| c == '_' || is_letter(c) || c.is_numeric())
}

/// `str.isalpha` of one character: letters, but not Rust's other alphabetic characters.
fn is_letter(c: char) -> bool {
    c.is_alphabetic() && !c.is_numeric()
}

/// `str.isdigit` of one character.
fn is_digit(c: char) -> bool {
    is_decimal(c)
        || matches!(c, '\u{b2}' | '\u{b3}' | '\u{b9}' | '\u{2070}' | '\u{2074}'..='\u{2079}'
            | '\u{2080}'..='\u{2089}' | '\u{2460}'..='\u{2468}' | '\u{2474}'..='\u{247c}')
}

/// Decimal digits of the scripts in common use.
fn is_decimal(c: char) -> bool {
    const ZEROS: [u32; 20] = [
        0x30, 0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xc66, 0xce6, 0xd66,
        0xde6, 0xe50, 0xed0, 0xf20, 0x1040, 0x17e0, 0xff10,
    ];
    ZEROS
        .iter()
        .any(|&zero| (zero..zero + 10).contains(&u32::from(c)))
}

/// Whether there is a letter with case, and all such letters are `good`.
fn cased(text: &str, good: fn(char) -> bool, bad: fn(char) -> bool) -> bool {
    text.chars().any(good) && !text.chars().any(bad)
}

fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.push_str(&title_case(c));
        }
        inside = is_cased(c);
    }
    out
}

/// Whether it is a letter of some case.
fn is_cased(c: char) -> bool {
    c.is_uppercase() || c.is_lowercase() || DIGRAPHS.contains(&c)
}

/// Letters whose form at the beginning of a word is neither the large nor the small one, which stand before and
/// behind it in Unicode.
const DIGRAPHS: [char; 4] = ['\u{1c5}', '\u{1c8}', '\u{1cb}', '\u{1f2}'];

/// The form of `c` at the beginning of a word.
pub(super) fn title_case(c: char) -> String {
    let near = |digraph: &&char| u32::from(**digraph).abs_diff(u32::from(c)) <= 1;
    if let Some(digraph) = DIGRAPHS.iter().find(near) {
        return digraph.to_string();
    }
    let mut upper = c.to_uppercase();
    let first = upper.next().map(String::from).unwrap_or_default();
    first + &upper.flat_map(char::to_lowercase).collect::<String>()
}

fn is_title(text: &str) -> bool {
    let (mut inside, mut found) = (false, false);
    for c in text.chars() {
        if c.is_uppercase() {
            if inside {
                return false;
            }
            (inside, found) = (true, true);
        } else if c.is_lowercase() {
            if !inside {
                return false;
            }
            found = true;
        } else {
            inside = false;
        }
    }
    found
}

/// Strips spaces, or any of `chars`.
pub(super) fn strip<'t>(text: &'t str, chars: Option<&str>, left: bool, right: bool) -> &'t str {
    let strips = |c: char| chars.map_or_else(|| python::is_space(c), |chars| chars.contains(c));
    let text = if left {
        text.trim_start_matches(strips)
    } else {
        text
    };
    if right {
        text.trim_end_matches(strips)
    } else {
        text
    }
}

/// Replaces `old`, at most `count` times unless that is negative.
pub(super) fn replace(text: &str, old: &str, new: &str, count: i64) -> Result<String, Error> {
    let most = usize::try_from(count).unwrap_or(usize::MAX);
    let found = if new.len() > old.len() {
        text.matches(old).count().min(most)
    } else {
        0
    };
    if found.saturating_mul(new.len()) > TEXT_MAX {
        return Err(too_long());
    }
    Ok(text.replacen(old, new, most))
}

fn split(text: &str, separator: Option<&str>, most: usize, right: bool) -> Result<Value, Error> {
    let mut parts: Vec<&str> = Vec::new();
    match separator {
        Some("") => return Err(failed("empty separator")),
        Some(separator) if right => {
            parts.extend(text.rsplitn(most.saturating_add(1), separator));
            parts.reverse();
        }
        Some(separator) => parts.extend(text.splitn(most.saturating_add(1), separator)),
        None => {
            let mut rest = strip(text, None, !right, right);
            while !rest.is_empty() && parts.len() < most {
                let cut = if right {
                    rest.char_indices()
                        .rev()
                        .find(|(_, c)| python::is_space(*c))
                } else {
                    rest.char_indices().find(|(_, c)| python::is_space(*c))
                };
                let Some((at, space)) = cut else { break };
                let (before, behind) = (&rest[..at], &rest[at + space.len_utf8()..]);
                let (word, others) = if right {
                    (behind, before)
                } else {
                    (before, behind)
                };
                parts.push(word);
                rest = strip(others, None, !right, right);
            }
            // As in Python, the rest keeps the spaces on its other side unless `most` was not reached.
            if most > parts.len() {
                rest = strip(rest, None, true, true);
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
            if right {
                parts.reverse();
            }
        }
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let mut out = Vec::new();
    let mut rest = text;
    let ends = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    while let Some(at) = rest.find(ends) {
        let end = rest[at..].chars().next().map_or(0, char::len_utf8);
        let end = at
            + if rest[at..].starts_with("\r\n") {
                2
            } else {
                end
            };
        out.push(&rest[..if keep { end } else { at }]);
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        out.push(rest);
    }
    out
}

/// Pads to `width` characters.
pub(super) fn pad(text: &str, width: i64, fill: &str, side: &str) -> Result<String, Error> {
    let len = text.chars().count();
    let width = usize::try_from(width).unwrap_or(0);
    let missing = width.saturating_sub(len);
    if missing > TEXT_MAX {
        return Err(too_long());
    }
    let left = match side {
        "ljust" => 0,
        "rjust" => missing,
        // As CPython divides: the odd one goes to the left if the width is odd.
        _ => missing / 2 + (missing & width & 1),
    };
    Ok([&fill.repeat(left), text, &fill.repeat(missing - left)].concat())
}

fn expand_tabs(text: &str, size: i64) -> Result<String, Error> {
    let size = usize::try_from(size).unwrap_or(0);
    let mut out = String::with_capacity(text.len());
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                if out.len().saturating_add(spaces) > TEXT_MAX {
                    return Err(too_long());
                }
                out.push_str(&" ".repeat(spaces));
                column += spaces;
            }
            '\n' | '\r' => {
                out.push(c);
                column = 0;
            }
            _ => {
                out.push(c);
                column += 1;
            }
        }
    }
    Ok(out)
}
