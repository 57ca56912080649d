//! A list of flows in a separate file: CSV with a header, or one JSON object per line. It is read
//! as a stream, so only the memory of the flows limits its length.

use std::fmt;
use std::io::{BufRead, Read as _};
use std::path::Path;

use serde::Deserializer as _;
use serde::de::{MapAccess, Visitor};
use serde_json::Value;

/// Maximum length of a line, bytes.
const LINE_BYTES_MAX: u64 = 4096;
/// Maximum number of errors per file, as more rarely add information.
pub(super) const PROBLEMS_MAX: usize = 10;

/// A flow of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) id: Option<u64>,
    pub(super) src: u32,
    pub(super) dst: u32,
    pub(super) bytes: u64,
    /// After the `initial_delay` of the list, ns.
    pub(super) start_ns: u64,
    pub(super) class: Option<u8>,
    pub(super) priority: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Id,
    Src,
    Dst,
    Bytes,
    StartS,
    StartNs,
    Class,
    Priority,
}

const COLUMNS: [(&str, Column); 8] = [
    ("id", Column::Id),
    ("src", Column::Src),
    ("dst", Column::Dst),
    ("bytes", Column::Bytes),
    ("start_s", Column::StartS),
    ("start_ns", Column::StartNs),
    ("class", Column::Class),
    ("priority", Column::Priority),
];

fn column(name: &str) -> Result<Column, String> {
    COLUMNS
        .iter()
        .find(|(word, _)| *word == name)
        .map(|(_, column)| *column)
        .ok_or_else(|| {
            let words: Vec<&str> = COLUMNS.iter().map(|(word, _)| *word).collect();
            format!("unknown column `{name}`; known are {}", words.join(", "))
        })
}

/// A row while it is parsed.
#[derive(Default)]
struct Draft {
    id: Option<u64>,
    src: Option<u32>,
    dst: Option<u32>,
    bytes: Option<u64>,
    start_ns: Option<u64>,
    class: Option<u8>,
    priority: Option<u8>,
}

impl Draft {
    fn set(&mut self, column: Column, text: &str) -> Result<(), String> {
        fn number<T: std::str::FromStr>(text: &str, must: &str) -> Result<T, String> {
            text.parse()
                .map_err(|_| format!("is `{text}`, but must be {must}"))
        }
        let host = "the number of a host";
        match column {
            Column::Id => self.id = Some(number(text, "a whole number")?),
            Column::Src => self.src = Some(number(text, host)?),
            Column::Dst => self.dst = Some(number(text, host)?),
            Column::Bytes => {
                let bytes: u64 = number(text, "a whole number of bytes, at least 1")?;
                if bytes == 0 {
                    return Err("is 0, but a flow sends at least 1 byte".into());
                }
                self.bytes = Some(bytes);
            }
            Column::StartNs => self.start_ns = Some(number(text, "a whole number of ns")?),
            Column::StartS => {
                let start: f64 = number(text, "a number of s")?;
                if !(0.0..1e9).contains(&start) {
                    return Err(format!("is `{text}`, but must be from 0 to 1e9 s"));
                }
                if start > 0.0 && super::ns(start) == 0 {
                    return Err(format!(
                        "is `{text}`, but must be {}",
                        super::units::WHOLE_NS
                    ));
                }
                self.start_ns = Some(super::ns(start));
            }
            Column::Class => self.class = Some(number(text, "a class from 0 to 255")?),
            Column::Priority => {
                let priority: u8 = number(text, "a priority from 0 to 7")?;
                if priority > 7 {
                    return Err(format!("is {priority}, but must be from 0 to 7"));
                }
                self.priority = Some(priority);
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Row, String> {
        let missing = |name: &str| format!("`{name}` is missing");
        Ok(Row {
            id: self.id,
            src: self.src.ok_or_else(|| missing("src"))?,
            dst: self.dst.ok_or_else(|| missing("dst"))?,
            bytes: self.bytes.ok_or_else(|| missing("bytes"))?,
            start_ns: self.start_ns.unwrap_or(0),
            class: self.class,
            priority: self.priority,
        })
    }
}

/// Reads the list `file`, named `path`, and passes its flows to `take` in order, with their lines.
///
/// # Errors
/// Each with path and line, at most ten of them.
pub(super) fn read(
    path: &Path,
    mut file: Box<dyn BufRead>,
    take: &mut dyn FnMut(Row, u64) -> Result<(), String>,
) -> Result<(), Vec<String>> {
    let ending = path.extension().map(|e| e.to_string_lossy().to_lowercase());
    let json = match ending.as_deref() {
        Some("csv") => false,
        Some("jsonl" | "ndjson") => true,
        _ => {
            return Err(vec![format!(
                "{}: a list of flows is .csv, .jsonl or .ndjson",
                path.display()
            )]);
        }
    };
    let mut problems = Vec::new();
    let mut header: Option<Vec<Column>> = None;
    let (mut line, mut number, mut rows) = (String::new(), 0u64, 0u64);
    loop {
        line.clear();
        number += 1;
        let place = |what: String| format!("{}:{number}: {what}", path.display());
        let got = (&mut file).take(LINE_BYTES_MAX).read_line(&mut line);
        match got {
            Ok(0) => break,
            Ok(n) if n as u64 == LINE_BYTES_MAX && !line.ends_with('\n') => {
                problems.push(place(format!("a line of more than {LINE_BYTES_MAX} bytes")));
                break;
            }
            Ok(_) => {}
            Err(error) => {
                problems.push(place(error.to_string()));
                break;
            }
        }
        // Spreadsheets write a byte order mark at the start of UTF-8 files.
        let text = if number == 1 {
            line.trim_start_matches('\u{feff}').trim()
        } else {
            line.trim()
        };
        if text.is_empty() || !json && text.starts_with('#') {
            continue;
        }
        let row = if json {
            json_row(text)
        } else if let Some(header) = &header {
            csv_row(header, text)
        } else {
            match csv_header(text) {
                Ok(columns) => {
                    header = Some(columns);
                    continue;
                }
                Err(what) => {
                    problems.push(place(what));
                    break;
                }
            }
        };
        rows += 1;
        if let Err(what) = row.and_then(|row| take(row, number)) {
            problems.push(place(what));
            if problems.len() == PROBLEMS_MAX {
                break;
            }
        }
    }
    if rows == 0 && problems.is_empty() {
        problems.push(format!("{}: it lists no flows", path.display()));
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(problems)
    }
}

fn csv_header(text: &str) -> Result<Vec<Column>, String> {
    let mut columns = Vec::new();
    for name in text.split(',') {
        let column = column(name.trim())?;
        if columns.contains(&column) {
            return Err(format!("the column `{}` occurs twice", name.trim()));
        }
        columns.push(column);
    }
    for (name, needed) in &COLUMNS[1..4] {
        if !columns.contains(needed) {
            return Err(format!(
                "the first line has no column `{name}`; it must have src, dst and bytes"
            ));
        }
    }
    if columns.contains(&Column::StartS) && columns.contains(&Column::StartNs) {
        return Err("start_s and start_ns both set the start; keep one".into());
    }
    Ok(columns)
}

/// All cells are numbers, so quotes are not supported.
fn csv_row(header: &[Column], text: &str) -> Result<Row, String> {
    let cells = text.split(',').count();
    if cells != header.len() {
        return Err(format!(
            "{cells} cells, but the first line has {}",
            header.len()
        ));
    }
    let mut draft = Draft::default();
    for (&column, cell) in header.iter().zip(text.split(',')) {
        let cell = cell.trim();
        // An empty cell omits a value.
        if !cell.is_empty() {
            let named = |what| format!("`{}` {what}", name_of(column));
            draft.set(column, cell).map_err(named)?;
        }
    }
    draft.finish()
}

fn name_of(column: Column) -> &'static str {
    COLUMNS
        .iter()
        .find(|(_, c)| *c == column)
        .map_or("", |(name, _)| name)
}

fn json_row(text: &str) -> Result<Row, String> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let members = reader
        .deserialize_any(Members)
        .and_then(|members| reader.end().map(|()| members))
        .map_err(|error| json_error(&error))?;
    let mut draft = Draft::default();
    let mut seen = Vec::new();
    for (name, value) in &members {
        let column = column(name)?;
        if seen.contains(&column) {
            return Err(format!("`{name}` occurs twice"));
        }
        seen.push(column);
        match value {
            Value::Null => {}
            Value::Number(number) => draft
                .set(column, &number.to_string())
                .map_err(|what| format!("`{name}` {what}"))?,
            _ => return Err(format!("`{name}` must be a number")),
        }
    }
    if seen.contains(&Column::StartS) && seen.contains(&Column::StartNs) {
        return Err("start_s and start_ns both set the start; keep one".into());
    }
    draft.finish()
}

/// An error in a line. The parser counts lines within this line, so its line number is replaced by
/// the file's.
fn json_error(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let what = text.strip_suffix(&place).unwrap_or(&text);
    if error.is_data() {
        what.to_owned()
    } else {
        format!("invalid JSON: {what} at column {}", error.column())
    }
}

/// Reads an object as its members in order, including repeated ones, which a map would drop.
struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = Vec<(String, Value)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object, such as {\"src\": 0, \"dst\": 1, \"bytes\": 1000}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(name: &str, text: &'static str) -> Result<Vec<Row>, String> {
        let mut rows = Vec::new();
        let mut take = |row, _| {
            rows.push(row);
            Ok(())
        };
        read(Path::new(name), Box::new(text.as_bytes()), &mut take)
            .map_err(|problems| problems.join("\n"))?;
        Ok(rows)
    }

    #[test]
    fn both_forms_give_the_same_flows() {
        let csv = rows(
            "f.csv",
            "# two flows\nsrc, dst,bytes,start_s,class,id\n0,1,1000,0.5,,\n3,2,7,,2,99\n",
        )
        .unwrap();
        let json = rows(
            "f.jsonl",
            "{\"src\": 0, \"dst\": 1, \"bytes\": 1000, \"start_ns\": 500000000}\n\n\
             {\"dst\": 2, \"src\": 3, \"bytes\": 7, \"class\": 2, \"id\": 99, \"priority\": null}",
        )
        .unwrap();
        assert_eq!(csv, json);
        assert_eq!((csv[0].start_ns, csv[1].id), (500_000_000, Some(99)));
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        for (name, text) in [
            ("f.csv", "\u{feff}src,dst,bytes\n0,1,7\n"),
            (
                "f.jsonl",
                "\u{feff}{\"src\": 0, \"dst\": 1, \"bytes\": 7}\n",
            ),
        ] {
            assert_eq!(rows(name, text).map(|rows| rows[0].bytes), Ok(7), "{name}");
        }
    }

    #[test]
    fn errors_name_the_line_once() {
        for (name, text, part) in [
            (
                "f.csv",
                "src,dst,bytes\n0,1,5\n0,x,5\n",
                "f.csv:3: `dst` is `x`",
            ),
            ("f.csv", "src,dst,bytes\n0,1\n", "f.csv:2: 2 cells"),
            ("f.csv", "src,dst,bytes\n0,1,0\n", "at least 1 byte"),
            (
                "f.csv",
                "src,dst,bytes\n0,,5\n",
                "f.csv:2: `dst` is missing",
            ),
            ("f.csv", "src,dst\n0,1\n", "has no column `bytes`"),
            ("f.csv", "src,dst,bytes,src\n", "twice"),
            ("f.csv", "src,dst,bytes,size\n", "unknown column `size`"),
            ("f.csv", "src,dst,bytes,start_s,start_ns\n", "keep one"),
            ("f.csv", "src,dst,bytes\n", "lists no flows"),
            ("f.csv", "", "lists no flows"),
            ("f.jsonl", "{\"src\": 0}\n", "f.jsonl:1: `dst` is missing"),
            (
                "f.jsonl",
                "[0, 1]\n",
                "f.jsonl:1: invalid type: sequence, expected an object",
            ),
            (
                "f.jsonl",
                "{\"src\": 0, \"dst\": 1, \"bytes\": 2, \"bytes\": 3}\n",
                "f.jsonl:1: `bytes` occurs twice",
            ),
            (
                "f.jsonl",
                "{\"src\": -1, \"dst\": 1, \"bytes\": 2}\n",
                "`src` is `-1`",
            ),
            (
                "f.jsonl",
                "\n\nsrc,dst\n",
                "f.jsonl:3: invalid JSON: expected value at column 1",
            ),
            ("f.txt", "", "is .csv, .jsonl or .ndjson"),
        ] {
            let error = rows(name, text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        let many = "src,dst,bytes\n".to_owned() + &"x,1,2\n".repeat(50);
        let error = rows("f.csv", many.leak()).unwrap_err();
        assert_eq!(error.lines().count(), PROBLEMS_MAX);
        let long = " ".repeat(5000) + "\n";
        assert!(rows("f.csv", long.leak()).unwrap_err().contains("4096"));
    }
}
