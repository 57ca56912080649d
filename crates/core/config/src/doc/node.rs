//! The document as a tree in which every value has its origin, and the layers over it.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use slipstream_base::width::to_u32;

use super::diagnostic::{Diagnostic, Diagnostics, shown};
use super::settings::Settings;
use super::table::{Context, Table};

/// Origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Not set.
    Default,
    /// From a preset.
    Preset(String),
    /// Computed; the text explains how.
    Derived(String),
    /// From a file. `line` and `column` count from 1; 0 means the file as a whole.
    File {
        /// Path of the file as it was given.
        file: Arc<str>,
        /// Line.
        line: u32,
        /// Column, in characters.
        column: u32,
    },
    /// An environment variable.
    Env(String),
    /// A flag `--set`; its text `key=value`.
    Set(String),
    /// A flag of its own, such as `--seed`.
    Flag(String),
}

impl Origin {
    /// Precedence: file over default, environment over file, flag over environment.
    pub(super) fn layer(&self) -> u8 {
        match self {
            Origin::Default | Origin::Preset(_) | Origin::Derived(_) => 0,
            Origin::File { .. } => 1,
            Origin::Env(_) => 2,
            Origin::Set(_) | Origin::Flag(_) => 3,
        }
    }

    /// Order of errors: the file from top to bottom, then environment and flags, then the rest.
    pub(super) fn position(&self) -> (u8, u32, u32) {
        match self {
            Origin::File { line, column, .. } => (0, *line, *column),
            Origin::Env(_) => (1, 0, 0),
            Origin::Set(_) | Origin::Flag(_) => (2, 0, 0),
            Origin::Default | Origin::Preset(_) | Origin::Derived(_) => (3, 0, 0),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::Preset(name) => write!(f, "preset {}", shown(name)),
            Origin::Derived(how) => f.write_str(how),
            Origin::File { file, line: 0, .. } => f.write_str(file),
            Origin::File { file, line, .. } => write!(f, "{file}:{line}"),
            Origin::Env(name) => write!(f, "environment {}", shown(name)),
            Origin::Set(text) => write!(f, "--set {}", shown(text)),
            Origin::Flag(name) => f.write_str(&shown(name)),
        }
    }
}

/// A value of the document.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) kind: Kind,
    /// Position of the value.
    pub(super) at: Origin,
    /// Position of its key.
    pub(super) key_at: Origin,
    /// Its path as written, such as `engine.block_size`.
    pub(super) path: String,
    /// The written text, if a flag or a variable set exactly this key.
    pub(super) raw: Option<String>,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    String(String),
    /// Text of the integer, if it does not fit.
    Integer(Result<i64, String>),
    Float(f64),
    Bool(bool),
    Date(String),
    Array(Vec<Node>),
    /// In document order.
    Table(Vec<(String, Node)>),
}

impl Node {
    pub(super) fn empty_table(at: Origin) -> Node {
        Node {
            kind: Kind::Table(Vec::new()),
            at: at.clone(),
            key_at: at,
            path: String::new(),
            raw: None,
        }
    }

    pub(super) fn child(&self, key: &str) -> Option<&Node> {
        match &self.kind {
            Kind::Table(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, n)| n),
            _ => None,
        }
    }

    /// Whether a node at `keys` satisfies `test`; all items of arrays on the path are checked.
    pub(super) fn any(&self, keys: &[&str], test: &dyn Fn(&Node) -> bool) -> bool {
        match (&self.kind, keys) {
            (_, []) => test(self),
            (Kind::Array(items), _) => items.iter().any(|item| item.any(keys, test)),
            (_, [key, rest @ ..]) => self.child(key).is_some_and(|node| node.any(rest, test)),
        }
    }

    /// The item at `path` in nested arrays, as far as it exists.
    pub(super) fn item(&self, path: &[usize]) -> &Node {
        match (&self.kind, path) {
            (Kind::Array(items), [at, rest @ ..]) if *at < items.len() => items[*at].item(rest),
            _ => self,
        }
    }

    /// Overlays `self` with `over`: tables key by key, other values as a whole.
    pub(super) fn overlay(&mut self, over: Node) {
        match (&mut self.kind, over.kind) {
            (Kind::Table(mine), Kind::Table(theirs)) => {
                for (key, node) in theirs {
                    match mine.iter_mut().find(|(k, _)| *k == key) {
                        Some((_, old)) => old.overlay(node),
                        None => mine.push((key, node)),
                    }
                }
            }
            (_, kind) => *self = Node { kind, ..over },
        }
    }
}

/// A parsed document, ready to be overlaid and read.
///
/// Layers are applied in the order file, environment, flags; the later overrides. Errors in a layer
/// are kept, and reported by [`Doc::read`] with the rest.
#[derive(Debug)]
pub struct Doc {
    name: Arc<str>,
    root: Node,
    diagnostics: Vec<Diagnostic>,
    /// Lines with a syntax error: their values are not reported a second time.
    broken_lines: Vec<u32>,
    /// The first line with a broken table header: the values below are in another table than the user means.
    broken_header: Option<u32>,
}

impl Doc {
    /// Size limit of a document: reading takes about a hundred times its text in memory, 1.6 GB at
    /// this limit.
    pub const BYTES_MAX: usize = 16 << 20;
    /// Limit of a key's parts in a flag or variable, because trees are walked and dropped
    /// recursively. In documents, the parser rejects deep nesting.
    const DEPTH_MAX: usize = 64;

    /// Parses `text`, the content of the file `name`. Bytes that are not UTF-8 and broken syntax
    /// become errors; the rest is read.
    pub fn parse(name: &str, text: &[u8]) -> Doc {
        let mut doc = Doc {
            name: name.into(),
            root: Node::empty_table(Origin::Default),
            diagnostics: Vec::new(),
            broken_lines: Vec::new(),
            broken_header: None,
        };
        let whole = Origin::File {
            file: doc.name.clone(),
            line: 0,
            column: 0,
        };
        doc.root = Node::empty_table(whole.clone());
        if text.len() > Self::BYTES_MAX {
            let hint = format!("the limit is {} bytes", Self::BYTES_MAX);
            doc.note(
                whole,
                format!("{} bytes are too many", text.len()),
                Some(hint),
            );
            return doc;
        }
        let lossy = String::from_utf8_lossy(text);
        let lines = Lines::new(&doc.name, &lossy);
        if let Err(error) = std::str::from_utf8(text) {
            // Valid up to this offset, so the lossy text has the same offsets so far.
            let at = lines.place(error.valid_up_to());
            doc.broken(at, "not UTF-8", Some("save the file as UTF-8".into()));
        }
        let (table, errors) = DeTable::parse_recoverable(&lossy);
        for error in errors {
            let at = lines.place(error.span().map_or(0, |span| span.start));
            if let Origin::File { line, .. } = at
                && doc.broken_lines.last() == Some(&line)
            {
                continue; // what the parser reports after its first error on a line
            }
            let hint = match error.message() {
                m if m.contains("must be quoted") => {
                    Some("put the text between double quotes".into())
                }
                m if m.contains("duplicate key") => Some("keep one of the two".into()),
                _ => None,
            };
            if let Origin::File { line, .. } = at
                && lossy
                    .lines()
                    .nth(line as usize - 1)
                    .is_some_and(|text| text.trim_start().starts_with('['))
            {
                doc.broken_header = doc.broken_header.or(Some(line));
            }
            doc.broken(at, error.message(), hint);
        }
        doc.root = Node {
            kind: Kind::Table(convert_table(table.get_ref(), "", &|offset| {
                lines.place(offset)
            })),
            ..Node::empty_table(whole)
        };
        doc
    }

    /// A document without a file: defaults, environment and flags.
    pub fn empty() -> Doc {
        Doc {
            name: "".into(),
            root: Node::empty_table(Origin::Default),
            diagnostics: Vec::new(),
            broken_lines: Vec::new(),
            broken_header: None,
        }
    }

    /// Overlays the document with environment variables: `SLIPSTREAM_ENGINE__MAX_NUM_SEQS=64` sets
    /// `engine.max_num_seqs`. The rest of the name after `prefix` is the path in lower case, with
    /// two underscores for each dot. Variables without two underscores there are ignored.
    pub fn env(&mut self, prefix: &str, vars: impl IntoIterator<Item = (String, String)>) {
        let mut ours: Vec<_> = vars
            .into_iter()
            .filter_map(|(name, value)| {
                let rest = name.strip_prefix(prefix)?;
                let path = rest.to_lowercase().replace("__", ".");
                rest.contains("__").then_some((name, path, value))
            })
            .collect();
        ours.sort(); // the environment has no order, but errors and overlays need one
        for (name, path, value) in ours {
            self.overlay(&path, &value, &Origin::Env(name));
        }
    }

    /// Overlays the document with a flag `--set key=value`. `value` is TOML; anything else is read
    /// as a string, so quotes may be omitted. A command that sets a key by a flag of its own writes
    /// `--flag: key=value`: errors then name that flag.
    pub fn set(&mut self, assignment: &str) {
        let by_flag = assignment
            .starts_with("--")
            .then(|| assignment.split_once(": "))
            .flatten();
        let (origin, assignment) = match by_flag {
            Some((flag, assignment)) => (Origin::Flag(flag.to_owned()), assignment),
            None => (Origin::Set(assignment.to_owned()), assignment),
        };
        match assignment.split_once('=') {
            Some((path, value)) => self.overlay(path.trim(), value.trim(), &origin),
            None => self.note(
                origin,
                "no `=` in it".into(),
                Some("write `--set engine.max_num_seqs=64`".into()),
            ),
        }
    }

    /// As [`set`](Self::set), for a flag of its own: errors name `flag`, such as `--price l4=2`.
    pub fn set_by_flag(&mut self, flag: &str, key: &str, value: &str) {
        self.overlay(key, value, &Origin::Flag(flag.to_owned()));
    }

    /// Drops a key, such as `pool` or `engine.timing`, with everything below it. Returns whether it was there.
    pub fn remove(&mut self, key: &str) -> bool {
        let (tables, last) = key.rsplit_once('.').unwrap_or(("", key));
        let mut node = &mut self.root;
        for part in tables.split('.').filter(|part| !part.is_empty()) {
            let Kind::Table(entries) = &mut node.kind else {
                return false;
            };
            let Some((_, below)) = entries.iter_mut().find(|(name, _)| name == part) else {
                return false;
            };
            node = below;
        }
        let Kind::Table(entries) = &mut node.kind else {
            return false;
        };
        let before = entries.len();
        entries.retain(|(name, _)| name != last);
        entries.len() < before
    }

    /// Keys of the top-level table `table`, in document order; none if it is not a table.
    pub fn keys(&self, table: &str) -> Vec<String> {
        match self.root.child(table).map(|node| &node.kind) {
            Some(Kind::Table(keys)) => keys.iter().map(|(name, _)| name.clone()).collect(),
            _ => Vec::new(),
        }
    }

    /// Names of the tables in the top-level table `table` that have `key`, in document order.
    pub fn tables_with(&self, table: &str, key: &str) -> Vec<String> {
        let Some(Kind::Table(tables)) = self.root.child(table).map(|node| &node.kind) else {
            return Vec::new();
        };
        let having = tables.iter().filter(|(_, node)| node.child(key).is_some());
        having.map(|(name, _)| name.clone()).collect()
    }

    /// An error if the file has top-level keys of `others` and none of `own`.
    ///
    /// # Errors
    /// `message`, with the remedy `hint`.
    pub fn refuse_kind(
        &self,
        own: &[&str],
        others: &[&str],
        message: &str,
        hint: &str,
    ) -> Result<(), Diagnostics> {
        let Kind::Table(entries) = &self.root.kind else {
            return Ok(());
        };
        let in_file = |keys: &[&str]| {
            let mut entries = entries.iter();
            entries.find(|(key, node)| {
                matches!(node.at, Origin::File { .. }) && keys.contains(&key.as_str())
            })
        };
        match in_file(others) {
            Some((key, node)) if in_file(own).is_none() => {
                let message = format!("{message}: it has `{key}`");
                let at = node.key_at.clone();
                Err(Diagnostics::one(at, message, Some(hint.to_owned())))
            }
            _ => Ok(()),
        }
    }

    fn overlay(&mut self, path: &str, value: &str, origin: &Origin) {
        let parts: Vec<&str> = path.split('.').map(str::trim).collect();
        if parts.len() > Self::DEPTH_MAX || parts.iter().any(|part| part.is_empty()) {
            let hint = "a key is words joined by dots, such as `engine.max_num_seqs`".to_owned();
            self.note(
                origin.clone(),
                format!("`{}` is not a key", shown(path)),
                Some(hint),
            );
            return;
        }
        let mut kind = match DeValue::parse(value) {
            Ok(parsed) => convert(parsed.get_ref(), path, &|_| origin.clone()),
            Err(_) => Kind::String(value.to_owned()),
        };
        // Wrap it from the inside out, then overlay the document with the whole.
        for depth in (0..parts.len()).rev() {
            let node = Node {
                kind,
                at: origin.clone(),
                key_at: origin.clone(),
                path: parts[..=depth].join("."),
                raw: (depth + 1 == parts.len()).then(|| value.to_owned()),
            };
            kind = Kind::Table(vec![(parts[depth].to_owned(), node)]);
        }
        let over = Node {
            kind,
            ..Node::empty_table(origin.clone())
        };
        self.root.overlay(over);
    }

    /// Reads the document with `read`, which reads every known key; other keys are errors.
    ///
    /// # Errors
    /// All errors together, if there are any.
    pub fn read<T>(self, read: impl FnOnce(&Table<'_>) -> T) -> Result<(T, Settings), Diagnostics> {
        if let Some(header) = self.broken_header {
            // Errors of keys would be consequences, also of keys that appear to be missing.
            let above = |d: &Diagnostic| d.at.position().0 > 0 || d.at.position().1 <= header;
            let diagnostics = self.diagnostics.into_iter().filter(above).collect();
            return Err(Diagnostics::collect(diagnostics).expect("the header's error"));
        }
        let mut broken_lines = self.broken_lines;
        broken_lines.sort_unstable();
        let cx = Context {
            file: self.name,
            broken_lines,
            diagnostics: RefCell::new(self.diagnostics),
            known: RefCell::default(),
            unknown: RefCell::default(),
            settings: RefCell::default(),
        };
        let root = Table::root(&cx, &self.root);
        let value = read(&root);
        root.close();
        cx.close().map(|settings| (value, settings))
    }

    fn note(&mut self, at: Origin, message: String, hint: Option<String>) {
        self.diagnostics.push(Diagnostic { at, message, hint });
    }

    fn broken(&mut self, at: Origin, message: &str, hint: Option<String>) {
        if let Origin::File { line, .. } = at {
            self.broken_lines.push(line);
        }
        self.note(at, shown(message), hint);
    }
}

fn convert_table(
    table: &DeTable<'_>,
    path: &str,
    place: &dyn Fn(usize) -> Origin,
) -> Vec<(String, Node)> {
    let mut entries: Vec<(usize, String, Node)> = table
        .iter()
        .map(|(key, value)| {
            let name: &str = key.get_ref();
            let path = if path.is_empty() {
                name.to_owned()
            } else {
                format!("{path}.{name}")
            };
            let node = Node {
                kind: convert(value.get_ref(), &path, place),
                at: place(value.span().start),
                key_at: place(key.span().start),
                path,
                raw: None,
            };
            (order(key, value), name.to_owned(), node)
        })
        .collect();
    // The parser sorts by name; users expect the file's order.
    entries.sort_by_key(|(start, ..)| *start);
    entries
        .into_iter()
        .map(|(_, name, node)| (name, node))
        .collect()
}

fn order(key: &Spanned<Cow<'_, str>>, value: &Spanned<DeValue<'_>>) -> usize {
    key.span().start.min(value.span().start)
}

pub(super) fn convert(value: &DeValue<'_>, path: &str, place: &dyn Fn(usize) -> Origin) -> Kind {
    match value {
        DeValue::String(text) => Kind::String(text.to_string()),
        DeValue::Integer(number) => Kind::Integer(
            i64::from_str_radix(number.as_str(), number.radix()).map_err(|_| number.to_string()),
        ),
        DeValue::Float(number) => Kind::Float(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(value) => Kind::Bool(*value),
        DeValue::Datetime(date) => Kind::Date(date.to_string()),
        DeValue::Array(items) => Kind::Array(
            items
                .iter()
                .enumerate()
                .map(|(index, item)| {
                    let path = format!("{path}[{index}]");
                    let at = place(item.span().start);
                    Node {
                        kind: convert(item.get_ref(), &path, place),
                        key_at: at.clone(),
                        at,
                        path,
                        raw: None,
                    }
                })
                .collect(),
        ),
        DeValue::Table(table) => Kind::Table(convert_table(table, path, place)),
    }
}

/// Turns byte offsets into lines and columns.
struct Lines<'t> {
    file: Arc<str>,
    text: &'t str,
    starts: Vec<usize>,
}

impl<'t> Lines<'t> {
    fn new(file: &Arc<str>, text: &'t str) -> Lines<'t> {
        let ends = text
            .bytes()
            .enumerate()
            .filter(|(_, b)| *b == b'\n')
            .map(|(i, _)| i + 1);
        Lines {
            file: file.clone(),
            text,
            starts: std::iter::once(0).chain(ends).collect(),
        }
    }

    fn place(&self, offset: usize) -> Origin {
        let offset = offset.min(self.text.len());
        let line = self.starts.partition_point(|start| *start <= offset);
        let start = self.starts[line - 1];
        // An offset inside a character cannot come from the parser; count its bytes then.
        let column = self
            .text
            .get(start..offset)
            .map_or(offset - start, |t| t.chars().count());
        Origin::File {
            file: self.file.clone(),
            line: to_u32(line),
            column: to_u32(column) + 1,
        }
    }
}
