//! Times as Python's `datetime.strftime` writes them, on glibc.

use chrono::{DateTime, NaiveDateTime};

/// `datetime.fromtimestamp(unix_s, UTC).replace(tzinfo=None).strftime(format)` in the locale `C`.
/// `None`: the text becomes longer than `bytes_max`.
pub(super) fn strftime(format: &str, unix_s: u64, bytes_max: usize) -> Option<String> {
    let time = i64::try_from(unix_s)
        .ok()
        .and_then(|s| DateTime::from_timestamp(s, 0));
    let time = time.unwrap_or_default().naive_utc();
    let mut out = String::with_capacity(format.len() + 16);
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let code = Code::of(rest);
        match code.as_ref().and_then(|code| code.shown(time)) {
            Some(shown) => out.push_str(&shown),
            // As glibc writes what it does not know.
            None => out.push_str(code.as_ref().map_or(rest, |code| code.source)),
        }
        rest = &rest[code.map_or(rest.len(), |code| code.source.len())..];
        // Widths make much of little.
        if out.len() > bytes_max {
            return None;
        }
    }
    Some(out + rest)
}

/// A conversion: `%`, flags, a width, `E` or `O`, and a letter.
struct Code<'f> {
    source: &'f str,
    flags: &'f str,
    width: Option<usize>,
    letter: char,
}

/// Limit of a conversion's width.
const WIDTH_MAX: usize = 1024;

impl<'f> Code<'f> {
    /// The conversion that `format` begins with; `None` if it is not complete.
    fn of(format: &'f str) -> Option<Code<'f>> {
        let inner = &format[1..];
        let behind = inner.trim_start_matches(['-', '_', '0', '^', '#']);
        let flags = &inner[..inner.len() - behind.len()];
        let letters = behind.trim_start_matches(|c: char| c.is_ascii_digit());
        let width = behind[..behind.len() - letters.len()].parse().ok();
        let modified = letters.strip_prefix(['E', 'O']).unwrap_or(letters);
        let letter = modified.chars().next()?;
        let len = format.len() - modified.len() + letter.len_utf8();
        Some(Code {
            source: &format[..len],
            flags,
            width: width.map(|width: usize| width.min(WIDTH_MAX)),
            letter,
        })
    }

    /// The text of the conversion; `None` if the letter has no meaning.
    fn shown(&self, time: NaiveDateTime) -> Option<String> {
        let pad = self
            .flags
            .chars()
            .rfind(|flag| matches!(flag, '-' | '_' | '0'));
        // The letter, what numbers are filled with, and to which width.
        let (text, fill, usual) = match self.letter {
            '%' => ("%".to_owned(), ' ', 0),
            'n' => ("\n".to_owned(), ' ', 0),
            't' => ("\t".to_owned(), ' ', 0),
            // Python's: microseconds. The time has none.
            'f' if self.source == "%f" => return Some("000000".to_owned()),
            // The time has no zone.
            'z' | 'Z' => return Some(String::new()),
            'd' | 'm' | 'y' | 'H' | 'I' | 'M' | 'S' | 'U' | 'V' | 'W' | 'C' | 'g' => {
                (self.number(time), '0', 2)
            }
            'j' => (self.number(time), '0', 3),
            'e' | 'k' | 'l' => (self.number(time), ' ', 2),
            'Y' | 'G' | 's' | 'u' | 'w' => (self.number(time), '0', 0),
            'a' | 'A' | 'b' | 'B' | 'h' | 'p' | 'P' | 'c' | 'D' | 'F' | 'r' | 'R' | 'T' | 'x'
            | 'X' => (
                time.format(&format!("%{}", self.letter)).to_string(),
                ' ',
                0,
            ),
            _ => return None,
        };
        let text = match self.flags.chars().rfind(|flag| matches!(flag, '^' | '#')) {
            Some('#') if self.letter == 'p' => text.to_lowercase(),
            Some(_) => text.to_uppercase(),
            None => text,
        };
        let (fill, usual) = match pad {
            Some('-') => (' ', 0),
            Some('_') => (' ', usual),
            Some(_) => ('0', usual),
            None => (fill, usual),
        };
        let width = self.width.unwrap_or(usual);
        let missing = width.saturating_sub(text.chars().count());
        Some(std::iter::repeat_n(fill, missing).collect::<String>() + &text)
    }

    /// The number of the conversion, without padding.
    fn number(&self, time: NaiveDateTime) -> String {
        time.format(&format!("%-{}", self.letter)).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From Python 3.11 with glibc: `datetime.fromtimestamp(s, UTC).replace(tzinfo=None).strftime(format)`.
    #[test]
    fn times_are_pythons() {
        for (unix_s, format, expected) in [
            (951_782_400, "%d %b %Y %A %j", "29 Feb 2000 Tuesday 060"),
            (
                1_783_000_000,
                "%-d/%-m/%y %I:%M %p|%e|%F|%T",
                "2/7/26 01:46 PM| 2|2026-07-02|13:46:40",
            ),
            (
                0,
                "%k|%l|%P|%C|%r|%D|%R|%u%w|%U%W%V|%G%g",
                " 0|12|am|19|12:00:00 AM|01/01/70|00:00|44|000001|197070",
            ),
            (
                0,
                "%c|%x|%X|%h|%s|%f|%z%Z|%n%t%%",
                "Thu Jan  1 00:00:00 1970|01/01/70|00:00:00|Jan|0|000000||\n\t%",
            ),
            (
                0,
                "%^a %#p %_d %05d %-I %Ey %Q % %-",
                "THU am  1 00001 12 70 %Q % %-",
            ),
            (
                0,
                "%+|%N|%v|%i|%10Y|%^B|%#B|%_H|%0e|%5n|%E%",
                "%+|%N|%v|%i|0000001970|JANUARY|JANUARY| 0|01|    \n|%",
            ),
            (0, "é%é%Oé%3f%-f%J", "é%é%Oé%3f%-f%J"),
            (
                0,
                "%10A|%010A|%3p|%-5d|%_5d|%10D|%-D|%_m",
                "  Thursday|00Thursday| AM|    1|    1|  01/01/70|01/01/70| 1",
            ),
            (0, "%-y|%-H%-M%-S|%-j|%-e|%-U%-W%-V%-g", "70|000|1|1|00170"),
        ] {
            let shown = strftime(format, unix_s, 1 << 10);
            assert_eq!(shown.as_deref(), Some(expected), "{format}");
        }
    }

    #[test]
    fn widths_are_bounded_together() {
        let format = "%1000d".repeat(1000);
        assert_eq!(strftime(&format, 0, 1 << 19), None);
        assert_eq!(strftime(&format, 0, 1 << 20).unwrap().len(), 1_000_000);
    }
}
