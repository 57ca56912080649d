//! Typed reading of tables and fields.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::ops::{Bound, RangeBounds};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use toml::de::DeValue;

use super::diagnostic::{Diagnostic, Diagnostics, alike, nearest, shown};
use super::node::{Kind, Node, Origin, convert};
use super::settings::{Settings, Step, dotted, string_to_toml};

/// State that all tables of one reading share.
pub(super) struct Context {
    pub(super) file: Arc<str>,
    /// In ascending order.
    pub(super) broken_lines: Vec<u32>,
    pub(super) diagnostics: RefCell<Vec<Diagnostic>>,
    /// Paths that were read, with the length of their table's part.
    pub(super) known: RefCell<BTreeSet<(String, String)>>,
    pub(super) unknown: RefCell<Vec<Unknown>>,
    pub(super) settings: RefCell<Settings>,
}

pub(super) struct Unknown {
    /// Path of the table as it was read.
    table: String,
    key: String,
    /// Path of the key as it is written.
    path: String,
    at: Origin,
}

impl Context {
    fn note(&self, at: Origin, message: String, hint: Option<String>) {
        if let Origin::File { line, .. } = at
            && self.broken_lines.binary_search(&line).is_ok()
        {
            return; // the syntax error on that line is reported
        }
        self.diagnostics
            .borrow_mut()
            .push(Diagnostic { at, message, hint });
    }

    pub(super) fn close(self) -> Result<Settings, Diagnostics> {
        let known = self.known.borrow();
        for (index, unknown) in self.unknown.borrow().iter().enumerate() {
            // A hint searches all known keys; a file with more unknown keys is not a configuration.
            const HINTS_MAX: usize = 200;
            let hint = if index < HINTS_MAX {
                hint_for(unknown, &known)
            } else {
                None
            };
            self.note(
                unknown.at.clone(),
                format!("unknown key `{}`", shown(&unknown.path)),
                hint,
            );
        }
        drop(known);
        match Diagnostics::collect(self.diagnostics.into_inner()) {
            None => Ok(self.settings.into_inner()),
            Some(diagnostics) => Err(diagnostics),
        }
    }
}

fn hint_for(unknown: &Unknown, known: &BTreeSet<(String, String)>) -> Option<String> {
    const LISTED_MAX: usize = 24;
    let here: Vec<&str> = known
        .iter()
        .filter(|(table, _)| *table == unknown.table)
        .map(|(_, k)| k.as_str())
        .collect();
    if let Some(key) = nearest(&unknown.key, here.iter().copied()) {
        return Some(format!("did you mean `{key}`?"));
    }
    // The right key in the wrong table. The shortest path is the most general one.
    let elsewhere = known
        .iter()
        .filter(|(_, key)| *key == unknown.key)
        .map(|(table, key)| {
            if table.is_empty() {
                key.clone()
            } else {
                format!("{table}.{key}")
            }
        })
        .min_by_key(String::len);
    if let Some(path) = elsewhere {
        return Some(format!("did you mean `{path}`?"));
    }
    match here.len() {
        0 => Some("no key belongs there; remove it".into()),
        1..=LISTED_MAX => Some(format!("known there: {}", here.join(", "))),
        _ => None,
    }
}

/// A table of the document during reading. A missing table reads as an empty one.
pub struct Table<'a> {
    cx: &'a Context,
    node: Option<&'a Node>,
    path: Vec<Step>,
    known: RefCell<BTreeSet<String>>,
}

impl<'a> Table<'a> {
    pub(super) fn root(cx: &'a Context, node: &'a Node) -> Table<'a> {
        Table {
            cx,
            node: Some(node),
            path: Vec::new(),
            known: RefCell::default(),
        }
    }

    fn at_path<'b>(&'b self, node: Option<&'b Node>, step: Step) -> Table<'b> {
        let mut path = self.path.clone();
        path.push(step);
        Table {
            cx: self.cx,
            node,
            path,
            known: RefCell::default(),
        }
    }

    /// Ends the reading of this table: keys that were not read are unknown.
    pub(super) fn close(&self) {
        let known = self.known.borrow();
        // Items of a long array have the same keys, so the first item's keys are enough for hints,
        // and memory does not grow with the array.
        const ITEMS_APART: usize = 64;
        let first: Vec<Step> = self
            .path
            .iter()
            .map(|step| match step {
                Step::Index(at) if *at >= ITEMS_APART => Step::Index(0),
                step => step.clone(),
            })
            .collect();
        let table = dotted(&first);
        self.cx
            .known
            .borrow_mut()
            .extend(known.iter().map(|key| (table.clone(), key.clone())));
        let Some(Kind::Table(entries)) = self.node.map(|n| &n.kind) else {
            return;
        };
        for (key, node) in entries.iter().filter(|(key, _)| !known.contains(key)) {
            self.cx.unknown.borrow_mut().push(Unknown {
                table: table.clone(),
                key: key.clone(),
                path: node.path.clone(),
                at: node.key_at.clone(),
            });
        }
    }

    /// The node under `key`, which becomes known.
    fn node(&self, key: &str) -> Option<&'a Node> {
        if !self.known.borrow().contains(key) {
            self.known.borrow_mut().insert(key.to_owned());
        }
        self.node.and_then(|n| n.child(key))
    }

    /// Path of `key` as written, or its path if it were set.
    fn path_of(&self, key: &str) -> String {
        if let Some(table) = self.node {
            if let Some(node) = table.child(key) {
                return node.path.clone();
            }
            if !table.path.is_empty() {
                return format!("{}.{key}", table.path);
            }
        }
        self.path_here(key)
    }

    /// Accepts all keys of this table unread: a wrong value, which is reported, decides which of them it may have.
    pub fn skip(&self) {
        if let Some(Kind::Table(entries)) = self.node.map(|n| &n.kind) {
            let mut known = self.known.borrow_mut();
            known.extend(entries.iter().map(|(key, _)| key.clone()));
        }
    }

    /// Whether the document has `key` here (a table or a value).
    pub fn has(&self, key: &str) -> bool {
        self.node(key).is_some()
    }

    /// Whether `key` holds a table, for keys that accept a value or a table. Reading it as the
    /// wrong one of the two is a usual error.
    pub fn holds_table(&self, key: &str) -> bool {
        self.node(key)
            .is_some_and(|n| matches!(n.kind, Kind::Table(_)))
    }

    /// Whether a value in the file at `path` (keys joined by dots, from here) satisfies `test`;
    /// values from flags and the environment do not count. All items of an array of tables on the
    /// path are checked. The keys do not become known: this distinguishes kinds of files before
    /// reading.
    pub fn any(&self, path: &str, test: impl Fn(&Value<'_>) -> bool) -> bool {
        let keys: Vec<&str> = path.split('.').collect();
        let passes = |node: &Node| {
            matches!(node.key_at, Origin::File { .. }) && test(&Value::of(&node.kind))
        };
        self.node.is_some_and(|n| n.any(&keys, &passes))
    }

    /// Whether a table of the document at `path` lacks the path's last key; arrays as in
    /// [`Table::any`]. A missing table lacks nothing.
    pub fn any_lacks(&self, path: &str) -> bool {
        let mut keys: Vec<&str> = path.split('.').collect();
        let last = keys.pop().unwrap_or_default();
        let lacks = |node: &Node| match &node.kind {
            Kind::Array(items) => items.iter().any(|item| item.child(last).is_none()),
            _ => node.child(last).is_none(),
        };
        self.node.is_some_and(|n| n.any(&keys, &lacks))
    }

    /// Whether the document has this table.
    pub fn is_present(&self) -> bool {
        self.node.is_some()
    }

    /// Whether `key` holds a table, for keys that accept a value or a table with details.
    pub fn has_table(&self, key: &str) -> bool {
        self.node(key)
            .is_some_and(|node| matches!(node.kind, Kind::Table(_)))
    }

    /// Origin of the value of `key`; [`Origin::Default`] if it is not set.
    pub fn origin(&self, key: &str) -> Origin {
        self.node(key).map_or(Origin::Default, |n| n.at.clone())
    }

    /// A value of type `T` under `key`.
    pub fn get<'t, T: Scalar + 't>(&'t self, key: &str) -> Field<'t, T> {
        let read = |node: &Node| {
            if let Some(value) = T::read(&Value::of(&node.kind)) {
                return Ok(value);
            }
            // Flags and variables are text: `--set model.name=8` is a name.
            if let Some(value) = node
                .raw
                .as_deref()
                .and_then(|raw| T::read(&Value::String(raw)))
            {
                return Ok(value);
            }
            if let Some((items, must)) = T::bad_item(&Value::of(&node.kind)) {
                return Err(Wrong {
                    items: items.clone(),
                    ..Wrong::of(node.item(&items), must.into())
                });
            }
            let unquoted = match &node.kind {
                Kind::String(text) => DeValue::parse(text).ok().and_then(|value| {
                    T::read(&Value::of(&convert(value.get_ref(), "", &|_| {
                        Origin::Default
                    })))
                }),
                _ => None,
            };
            Err(Wrong {
                hint: unquoted.map(|value| format!("write {} without the quotes", value.to_toml())),
                ..Wrong::of(node, T::MUST.into())
            })
        };
        self.field(key, read, Box::new(T::to_toml))
    }

    /// One of a list of words under `key`.
    pub fn choice<'t, T: Clone + PartialEq>(
        &'t self,
        key: &str,
        choices: &'t [(&'t str, T)],
    ) -> Field<'t, T> {
        let read = |node: &Node| {
            let words = || {
                choices
                    .iter()
                    .map(|(w, _)| format!("\"{w}\""))
                    .collect::<Vec<_>>()
            };
            let must = || format!("one of {}", words().join(", "));
            let Kind::String(text) = &node.kind else {
                return Err(Wrong::of(node, must()));
            };
            match choices.iter().find(|(word, _)| word == text) {
                Some((_, value)) => Ok(value.clone()),
                None => Err(Wrong {
                    hint: {
                        let words: Vec<&str> = choices.iter().map(|(w, _)| *w).collect();
                        let alike = alike(text, &words);
                        let quoted: Vec<String> =
                            alike.iter().map(|word| format!("\"{word}\"")).collect();
                        (!quoted.is_empty())
                            .then(|| format!("did you mean {}?", quoted.join(" or ")))
                    },
                    ..Wrong::of(node, must())
                }),
            }
        };
        let render = move |value: &T| {
            let word = choices
                .iter()
                .find(|(_, v)| v == value)
                .map_or("", |(word, _)| word);
            string_to_toml(word)
        };
        self.field(key, read, Box::new(render))
    }

    /// A path under `key`. In a file, relative paths start from the file's folder; from the
    /// environment or a flag, from the working directory.
    pub fn path(&self, key: &str) -> Field<'_, PathBuf> {
        let folder = Path::new(&*self.cx.file).parent().unwrap_or(Path::new(""));
        let read = |node: &Node| {
            let text = match (&node.kind, &node.raw) {
                (Kind::String(text), _) => text,
                (_, Some(raw)) => raw, // a folder called 2026
                _ => "",
            };
            if text.is_empty() {
                return Err(Wrong::of(node, "a path".into()));
            }
            Ok(match node.at {
                Origin::File { .. } => folder.join(text),
                _ => PathBuf::from(text),
            })
        };
        self.field(
            key,
            read,
            Box::new(|path: &PathBuf| string_to_toml(&path.to_string_lossy())),
        )
    }

    fn field<'t, T>(
        &'t self,
        key: &str,
        read: impl FnOnce(&Node) -> Result<T, Wrong>,
        render: Box<dyn Fn(&T) -> String + 't>,
    ) -> Field<'t, T> {
        let mut field = Field {
            table: self,
            key: key.to_owned(),
            value: None,
            given: false,
            render,
        };
        if let Some(node) = self.node(key) {
            field.given = true;
            match read(node) {
                Ok(value) => field.value = Some(value),
                Err(wrong) => {
                    let node = node.item(&wrong.items);
                    let message = format!(
                        "`{}` is {}, but must be {}",
                        shown(&node.path),
                        wrong.is,
                        wrong.must
                    );
                    self.cx.note(node.at.clone(), message, wrong.hint);
                }
            }
        }
        field
    }

    /// Reads the table under `key`; a missing one reads as empty.
    pub fn table<R>(&self, key: &str, read: impl FnOnce(&Table<'_>) -> R) -> R {
        let node = self.node(key).filter(|node| self.is_table(node));
        let table = self.at_path(node, Step::Key(key.to_owned()));
        let result = read(&table);
        table.close();
        result
    }

    /// Reads the table under `key` over the table `base`: keys that it does not have are read from
    /// there. Errors in them name the path in `base`.
    pub fn table_over<R>(
        &self,
        key: &str,
        base: &Table<'_>,
        read: impl FnOnce(&Table<'_>) -> R,
    ) -> R {
        let own = self.node(key).filter(|node| self.is_table(node));
        let mut merged = base.node.cloned();
        if let (Some(base), Some(own)) = (base.node, own) {
            self.refuse_shadowed(base, own);
        }
        if let Some(own) = own {
            match &mut merged {
                Some(merged) => merged.overlay(own.clone()),
                None => merged = Some(own.clone()),
            }
        }
        let table = self.at_path(merged.as_ref(), Step::Key(key.to_owned()));
        // Printed before the tables within it.
        self.cx.settings.borrow_mut().group(&table.path);
        let result = read(&table);
        table.close();
        result
    }

    /// Refuses values that a flag or variable sets in `base` and that `own`, from a lower layer, overrides: they
    /// would have no effect here.
    fn refuse_shadowed(&self, base: &Node, own: &Node) {
        let (Kind::Table(set), Kind::Table(_)) = (&base.kind, &own.kind) else {
            if base.at.layer() > own.at.layer() {
                let message = format!(
                    "`{}` would have no effect: `{}` is set ({})",
                    shown(&base.path),
                    shown(&own.path),
                    own.at
                );
                let hint = format!("set `{}` instead", shown(&own.path));
                self.cx.note(base.at.clone(), message, Some(hint));
            }
            return;
        };
        for (key, base) in set {
            if let Some(own) = own.child(key) {
                self.refuse_shadowed(base, own);
            }
        }
    }

    /// The table under `key` as a base for [`Table::table_over`]; its keys are checked there.
    pub fn base(&self, key: &str) -> Table<'_> {
        let node = self.node(key).filter(|node| self.is_table(node));
        self.at_path(node, Step::Key(key.to_owned()))
    }

    /// Reads every table under `key` (`[pool.NAME]`), in the document's order; at most 1,024.
    pub fn tables<R>(&self, key: &str, mut read: impl FnMut(&str, &Table<'_>) -> R) -> Vec<R> {
        let Some(node) = self.node(key).filter(|node| self.is_table(node)) else {
            return Vec::new();
        };
        let parent = self.at_path(Some(node), Step::Key(key.to_owned()));
        let Kind::Table(entries) = &node.kind else {
            return Vec::new();
        };
        let max = self.at_most(1 << 10, entries.len(), node);
        entries
            .iter()
            .take(max)
            .filter(|(_, node)| self.is_table(node))
            .map(|(name, node)| {
                let table = parent.at_path(Some(node), Step::Key(name.clone()));
                self.cx.settings.borrow_mut().group(&table.path);
                let result = read(name, &table);
                table.close();
                result
            })
            .collect()
    }

    /// Reads every table of the array under `key` (`[[event]]`); at most 262,144.
    pub fn array<R>(&self, key: &str, mut read: impl FnMut(usize, &Table<'_>) -> R) -> Vec<R> {
        let Some(node) = self.node(key) else {
            return Vec::new();
        };
        let parent = self.at_path(None, Step::Key(key.to_owned()));
        let Kind::Array(items) = &node.kind else {
            let wrong = Wrong::of(node, format!("an array of tables (`[[{key}]]`)"));
            let message = format!(
                "`{}` is {}, but must be {}",
                shown(&node.path),
                wrong.is,
                wrong.must
            );
            self.cx.note(node.key_at.clone(), message, None);
            return Vec::new();
        };
        let max = self.at_most(1 << 18, items.len(), node);
        items
            .iter()
            .take(max)
            .enumerate()
            .filter(|(_, node)| self.is_table(node))
            .map(|(index, node)| {
                let table = parent.at_path(Some(node), Step::Index(index));
                self.cx.settings.borrow_mut().group(&table.path);
                let result = read(index, &table);
                table.close();
                result
            })
            .collect()
    }

    /// Returns `max`, and reports an error if `node` holds more.
    fn at_most(&self, max: usize, count: usize, node: &Node) -> usize {
        if count > max {
            let message = format!(
                "`{}` has {count} entries, but must have at most {max}",
                shown(&node.path)
            );
            self.cx.note(node.key_at.clone(), message, None);
        }
        max
    }

    fn is_table(&self, node: &Node) -> bool {
        if matches!(node.kind, Kind::Table(_)) {
            return true;
        }
        let wrong = Wrong::of(node, "a table".into());
        let message = format!(
            "`{}` is {}, but must be {}",
            shown(&node.path),
            wrong.is,
            wrong.must
        );
        let hint = format!("write `[{}]` and its keys below", shown(&node.path));
        self.cx.note(node.key_at.clone(), message, Some(hint));
        false
    }

    /// Reports an error about `key`, at its position (or at its table's, if it is not set).
    /// `message` should name the key.
    pub fn error(&self, key: &str, message: impl Into<String>, hint: impl Into<String>) {
        let at = match self.node.and_then(|n| n.child(key)) {
            Some(node) => node.at.clone(),
            None => self.place(),
        };
        self.error_at(at, message, hint);
    }

    /// Reports an error at `at`, which [`Table::origin`] returned.
    ///
    /// Not in a document with broken syntax: keys may exist without having been read, so the error may be a
    /// consequence.
    pub fn error_at(&self, at: Origin, message: impl Into<String>, hint: impl Into<String>) {
        if self.cx.broken_lines.is_empty() {
            self.cx.note(at, message.into(), Some(hint.into()));
        }
    }

    /// Errors noted in the whole document so far. Checks that build on values read before are skipped if
    /// those were wrong already.
    pub fn error_count(&self) -> usize {
        self.cx.diagnostics.borrow().len()
    }

    /// Rejects `key` with a reason, if it is set; for keys that are known but cannot be used.
    pub fn refuse(&self, key: &str, reason: &str, hint: &str) {
        if let Some(node) = self.node(key) {
            let message = format!("`{}` {reason}", shown(&node.path));
            self.cx
                .note(node.key_at.clone(), message, Some(hint.to_owned()));
        }
    }

    /// Rejects `key` because the value of `decider` makes it useless. A key from a lower layer (or
    /// a more general table) than `decider` is ignored: `--set engine.timing.kind=constant` does
    /// not require removing the roofline's keys from the file.
    pub fn unused(&self, key: &str, decider: &str, reason: &str) {
        // A key of a base table (`table_over`) is more general than one written here.
        let rank = |key: &str| {
            let node = self.node(key)?;
            Some((node.path == self.path_here(key), node.at.layer()))
        };
        if rank(decider) > rank(key) {
            return;
        }
        self.refuse(key, &format!("is not used: {reason}"), "remove it");
    }

    fn path_here(&self, key: &str) -> String {
        let mut path = self.path.clone();
        path.push(Step::Key(key.to_owned()));
        dotted(&path)
    }

    fn place(&self) -> Origin {
        self.node.map_or(Origin::Default, |n| n.key_at.clone())
    }
}

/// The error of a value.
struct Wrong {
    /// Position in nested arrays, if not the value as a whole.
    items: Vec<usize>,
    is: String,
    must: String,
    hint: Option<String>,
}

impl Wrong {
    fn of(node: &Node, must: String) -> Wrong {
        let is = match &node.kind {
            Kind::String(text) => format!("a string (\"{}\")", shown(text)),
            Kind::Integer(Ok(number)) => number.to_string(),
            Kind::Integer(Err(text)) => shown(text),
            Kind::Float(number) => format!("{number:?}"),
            Kind::Bool(value) => value.to_string(),
            Kind::Date(text) => format!("a date ({})", shown(text)),
            Kind::Array(_) => "an array".into(),
            Kind::Table(_) => "a table".into(),
        };
        Wrong {
            items: Vec::new(),
            is,
            must,
            hint: None,
        }
    }
}

/// A value of a document, as read by a [`Scalar`].
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'v> {
    /// Text.
    String(&'v str),
    /// An integer.
    Integer(i64),
    /// A number with a point, or `inf` or `nan`.
    Float(f64),
    /// `true` or `false`.
    Bool(bool),
    /// An array.
    List(Vec<Value<'v>>),
    /// A table, a date, or an integer of more than 64 bits.
    Other,
}

impl Value<'_> {
    fn of(kind: &Kind) -> Value<'_> {
        match kind {
            Kind::String(text) => Value::String(text),
            Kind::Integer(Ok(number)) => Value::Integer(*number),
            Kind::Float(number) => Value::Float(*number),
            Kind::Bool(value) => Value::Bool(*value),
            Kind::Array(items) => Value::List(items.iter().map(|n| Value::of(&n.kind)).collect()),
            Kind::Integer(Err(_)) | Kind::Date(_) | Kind::Table(_) => Value::Other,
        }
    }
}

/// A type that a single value of a document can hold.
pub trait Scalar: Sized {
    /// Completes "… but must be": the accepted values.
    const MUST: &'static str;
    /// The value, if it is of this type and in its range.
    fn read(value: &Value<'_>) -> Option<Self>;
    /// For an array that is not of this type because of an item: its index (in nested arrays, one
    /// per level), and the accepted values there.
    fn bad_item(_value: &Value<'_>) -> Option<(Vec<usize>, &'static str)> {
        None
    }
    /// TOML that reads as `self`.
    fn to_toml(&self) -> String;
}

macro_rules! integer {
    ($type:ty, $must:literal) => {
        impl Scalar for $type {
            const MUST: &'static str = $must;
            fn read(value: &Value<'_>) -> Option<Self> {
                match value {
                    Value::Integer(number) => (*number).try_into().ok(),
                    _ => None,
                }
            }
            fn to_toml(&self) -> String {
                self.to_string()
            }
        }
    };
}
integer!(u16, "an integer from 0 to 65,535");
integer!(u32, "an integer from 0 to 4,294,967,295");
integer!(u64, "an integer from 0 to 2^63 - 1");
integer!(i64, "an integer of 64 bits");

/// Finite numbers only: no key accepts `inf` or `nan`.
impl Scalar for f64 {
    const MUST: &'static str = "a finite number";
    fn read(value: &Value<'_>) -> Option<Self> {
        match value {
            Value::Integer(number) => Some(*number as f64),
            Value::Float(number) if number.is_finite() => Some(*number),
            _ => None,
        }
    }
    fn to_toml(&self) -> String {
        format!("{self:?}")
    }
}

impl Scalar for bool {
    const MUST: &'static str = "true or false";
    fn read(value: &Value<'_>) -> Option<Self> {
        match value {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }
    fn to_toml(&self) -> String {
        self.to_string()
    }
}

impl Scalar for String {
    const MUST: &'static str = "a string";
    fn read(value: &Value<'_>) -> Option<Self> {
        match value {
            Value::String(text) => Some((*text).to_owned()),
            _ => None,
        }
    }
    fn to_toml(&self) -> String {
        string_to_toml(self)
    }
}

impl<T: Scalar> Scalar for Vec<T> {
    const MUST: &'static str = "an array";
    fn read(value: &Value<'_>) -> Option<Self> {
        match value {
            Value::List(items) => items.iter().map(T::read).collect(),
            _ => None,
        }
    }
    fn bad_item(value: &Value<'_>) -> Option<(Vec<usize>, &'static str)> {
        let Value::List(items) = value else {
            return None;
        };
        let at = items.iter().position(|item| T::read(item).is_none())?;
        let (mut path, must) = T::bad_item(&items[at]).unwrap_or((Vec::new(), T::MUST));
        path.insert(0, at);
        Some((path, must))
    }
    fn to_toml(&self) -> String {
        format!(
            "[{}]",
            self.iter().map(T::to_toml).collect::<Vec<_>>().join(", ")
        )
    }
}

/// A value in progress: checked by [`Field::within`] and [`Field::check`], then finished by
/// [`Field::or`], [`Field::or_from`], [`Field::optional`] or [`Field::required`], which record it.
#[must_use = "finish the field with `or`, `optional` or `required`"]
pub struct Field<'t, T> {
    table: &'t Table<'t>,
    key: String,
    value: Option<T>,
    /// Whether the key is set, with a valid value or not.
    given: bool,
    render: Box<dyn Fn(&T) -> String + 't>,
}

impl<T> Field<'_, T> {
    /// Requires the value to be in `range`.
    pub fn within(self, range: impl RangeBounds<T>) -> Self
    where
        T: PartialOrd + Display,
    {
        let must = match (range.start_bound(), range.end_bound()) {
            (Bound::Included(low), Bound::Included(high)) => format!("{low} to {high}"),
            (Bound::Included(low), Bound::Excluded(high)) => {
                format!("at least {low} and below {high}")
            }
            (Bound::Excluded(low), Bound::Included(high)) => {
                format!("above {low} and at most {high}")
            }
            (Bound::Excluded(low), Bound::Excluded(high)) => {
                format!("above {low} and below {high}")
            }
            (Bound::Included(low), Bound::Unbounded) => format!("at least {low}"),
            (Bound::Excluded(low), Bound::Unbounded) => format!("above {low}"),
            (Bound::Unbounded, Bound::Included(high)) => format!("at most {high}"),
            (Bound::Unbounded, Bound::Excluded(high)) => format!("below {high}"),
            (Bound::Unbounded, Bound::Unbounded) => "a value".into(),
        };
        self.check(|value| range.contains(value), &must)
    }

    /// Requires `ok` of the value; `must` completes "but must be …".
    pub fn check(mut self, ok: impl FnOnce(&T) -> bool, must: &str) -> Self {
        if let Some(value) = &self.value
            && !ok(value)
        {
            let message = format!(
                "`{}` is {}, but must be {must}",
                shown(&self.table.path_of(&self.key)),
                shown(&(self.render)(value)),
            );
            let at = self.table.origin(&self.key);
            self.table.cx.note(at, message, None);
            self.value = None;
        }
        self
    }

    /// The value, or `default`.
    pub fn or(self, default: T) -> T {
        self.or_from(Origin::Default, default)
    }

    /// The value, or `fallback` with its `origin`.
    pub fn or_from(self, origin: Origin, fallback: T) -> T {
        let origin = if self.given {
            self.table.origin(&self.key)
        } else {
            origin
        };
        let value = match self.value {
            Some(value) => value,
            None => fallback,
        };
        let text = (self.render)(&value);
        self.table.record(&self.key, Some(text), origin);
        value
    }

    /// The value, if it is set.
    pub fn optional(self) -> Option<T> {
        let text = self.value.as_ref().map(|value| (self.render)(value));
        let origin = self.table.origin(&self.key);
        self.table.record(&self.key, text, origin);
        self.value
    }

    /// The value; if it is not set, an error with `remedy`. `stand_in` lets the reading continue;
    /// the result is discarded.
    pub fn required(self, remedy: &str, stand_in: T) -> T {
        // In a document with broken syntax the key may exist without having been read.
        if !self.given && self.table.cx.broken_lines.is_empty() {
            let message = format!("`{}` is missing", shown(&self.table.path_of(&self.key)));
            self.table
                .cx
                .note(self.table.place(), message, Some(remedy.to_owned()));
        }
        self.or(stand_in)
    }
}

impl Table<'_> {
    fn record(&self, key: &str, value: Option<String>, origin: Origin) {
        self.cx
            .settings
            .borrow_mut()
            .record(&self.path, key, value, origin);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Diagnostics, Doc, Settings};
    use super::*;

    #[derive(Clone, Debug, Default, PartialEq)]
    struct Plant {
        name: String,
        rate: f64,
        kind: u8,
        lamp: Option<u32>,
        parts: Vec<(String, u32, String)>,
        events: Vec<f64>,
    }

    /// A reader with every feature: base tables, named tables, arrays, choices, refusals.
    fn read(doc: Doc) -> Result<(Plant, Settings), Diagnostics> {
        doc.read(|root| {
            root.refuse("later", "is not supported yet", "remove it");
            let base = root.base("common");
            let mut plant = root.table("plant", |t| Plant {
                name: t.get("name").required("name it", String::new()),
                rate: t.get("rate").within(0.0..=10.0).or(1.5),
                kind: t.choice("kind", &[("one", 1), ("two", 2)]).or(1),
                lamp: t.get("lamp").within(1..).optional(),
                ..Plant::default()
            });
            plant.parts = root.tables("part", |name, part| {
                part.table_over("common", &base, |t| {
                    let mode = t.choice("mode", &[("a", "a"), ("b", "b")]).or("a");
                    let size = if mode == "a" {
                        t.get("size").within(1..=9).or(3)
                    } else {
                        t.unused("size", "mode", "mode \"b\" has none");
                        0
                    };
                    (name.to_owned(), size, mode.to_owned())
                })
            });
            plant.events = root.array("event", |_, t| t.get("at_s").required("say when", 0.0));
            plant
        })
    }

    fn errors_of(text: &str) -> String {
        format!(
            "error: {}",
            read(Doc::parse("f.toml", text.as_bytes())).unwrap_err()
        )
    }

    const GOOD: &str = "[plant]\nname = \"a\"\nkind = \"two\"\nrate = 3\n\n[common]\nsize = 4\n\n\
        [part.z]\n[part.a.common]\nsize = 5\n[[event]]\nat_s = 1\n[[event]]\nat_s = 2.5\n";

    #[test]
    fn a_good_document_reads_with_its_origins() {
        let (plant, settings) = read(Doc::parse("f.toml", GOOD.as_bytes())).unwrap();
        assert_eq!(plant.kind, 2);
        assert_eq!(plant.rate, 3.0);
        let part = |name: &str, size| (name.to_owned(), size, "a".to_owned());
        assert_eq!(plant.parts, [part("z", 4), part("a", 5)], "in file order");
        assert_eq!(plant.events, [1.0, 2.5]);
        let origin = |path: &str| settings.get(path).unwrap().origin.to_string();
        assert_eq!(origin("plant.rate"), "f.toml:4");
        assert_eq!(origin("plant.lamp"), "default");
        assert_eq!(origin("part.z.common.size"), "f.toml:7", "inherited");
        assert_eq!(origin("part.a.common.size"), "f.toml:11");
        assert_eq!(origin("event[1].at_s"), "f.toml:15");
    }

    #[test]
    fn every_mistake_is_reported_with_place_and_remedy() {
        let text = "[plant]\nrate = 11\nkind = \"too\"\nlamp = \"3\"\nsize = 1\nrtae = 2\n\
            [later]\nx = 1\n[common]\nsize = 0\n[part]\nloose = 1\n[part.p]\n[part.q]\n";
        assert_eq!(
            errors_of(text),
            "error: f.toml:1:2: `plant.name` is missing\nhint: name it\n\
             error: f.toml:2:8: `plant.rate` is 11.0, but must be 0 to 10\n\
             error: f.toml:3:8: `plant.kind` is a string (\"too\"), but must be one of \"one\", \"two\"\n\
             hint: did you mean \"two\"?\n\
             error: f.toml:4:8: `plant.lamp` is a string (\"3\"), but must be an integer from 0 to 4,294,967,295\n\
             hint: write 3 without the quotes\n\
             error: f.toml:5:1: unknown key `plant.size`\n\
             hint: did you mean `part.p.common.size`?\n\
             error: f.toml:6:1: unknown key `plant.rtae`\n\
             hint: did you mean `rate`?\n\
             error: f.toml:7:2: `later` is not supported yet\n\
             hint: remove it\n\
             error: f.toml:10:8: `common.size` is 0, but must be 1 to 9\n\
             error: f.toml:12:1: `part.loose` is 1, but must be a table\n\
             hint: write `[part.loose]` and its keys below"
        );
    }

    #[test]
    fn broken_syntax_does_not_hide_other_mistakes_nor_double_them() {
        let text = "[plant]\nname = x\nrate = 99\nkind = \"one\nlamp = 0\n";
        let shown = errors_of(text);
        let lines: Vec<&str> = shown.lines().filter(|l| l.starts_with("error")).collect();
        assert_eq!(lines.len(), 4, "{shown}");
        for (line, place) in lines.iter().zip(["2:8", "3:8", "4:", "5:8"]) {
            assert!(
                line.starts_with(&format!("error: f.toml:{place}")),
                "{shown}"
            );
        }
    }

    #[test]
    fn a_document_can_be_looked_at_before_it_is_read() {
        let text = "[a]\nx = 1\n[[b]]\ny = 2\n[b.c]\nz = \"w\"\n[[b]]\n[b.c]\n";
        let mut doc = Doc::parse("f.toml", text.as_bytes());
        doc.set("a.flag=1");
        let (found, unknown) = {
            let mut found = Vec::new();
            let error = doc.read(|root| {
                let word = |v: &Value<'_>| *v == Value::String("w");
                found = vec![
                    root.any("a.x", |v| *v == Value::Integer(1)),
                    root.any("b.c.z", word),
                    root.any("b.c", |_| true),
                    root.any("a.x", word),
                    root.any("b.d", |_| true),
                    root.any("a.flag", |_| true), // not in the file
                    root.any_lacks("b.y"),
                    root.any_lacks("b.c.z"),
                    root.any_lacks("a.x"),
                    root.any_lacks("none.x"),
                ];
            });
            (found, error.unwrap_err().to_string())
        };
        assert_eq!(
            found,
            [
                true, true, true, false, false, false, true, true, false, false
            ]
        );
        // `any` makes no key known.
        assert!(unknown.contains("unknown key `a`"), "{unknown}");
    }

    #[test]
    fn bytes_that_are_no_utf8_are_placed() {
        let mut text = b"[plant]\nname = \"a\"\n# ".to_vec();
        text.push(0xff);
        let error = read(Doc::parse("f.toml", &text)).unwrap_err().to_string();
        assert!(error.starts_with("f.toml:3:3: not UTF-8"), "{error}");
    }

    #[test]
    fn flags_win_over_environment_over_file() {
        let mut doc = Doc::parse("f.toml", GOOD.as_bytes());
        doc.set("plant.rate=7");
        let var = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        doc.env(
            "S_",
            [
                var("S_PLANT__NAME", "8"),
                var("S_HOME", "x"),
                var("OTHER__X", "y"),
            ],
        );
        doc.set("plant.rate = 8");
        doc.set("part.new.common.mode=b");
        let (plant, settings) = read(doc).unwrap();
        assert_eq!(
            (plant.rate, plant.name.as_str()),
            (8.0, "8"),
            "a string needs no quotes"
        );
        assert_eq!(
            plant.parts[2],
            ("new".to_owned(), 0, "b".to_owned()),
            "size 4 is ignored"
        );
        assert_eq!(
            settings.get("plant.rate").unwrap().origin.to_string(),
            "--set plant.rate = 8"
        );
        let name = &settings.get("plant.name").unwrap().origin;
        assert_eq!(name.to_string(), "environment S_PLANT__NAME");
    }

    #[test]
    fn bad_flags_are_mistakes_like_others() {
        let mut doc = Doc::parse("f.toml", GOOD.as_bytes());
        for flag in [
            "plant.rate",
            "plant..rate=1",
            "plant.rate=x",
            "plant.raet=1",
            "plant=1",
            "=1",
        ] {
            doc.set(flag);
        }
        let shown = read(doc).unwrap_err().to_string();
        for part in [
            "--set plant.rate: no `=` in it",
            "--set plant..rate=1: `plant..rate` is not a key",
            "--set plant=1: `plant` is 1, but must be a table",
            "--set =1: `` is not a key",
        ] {
            assert!(shown.contains(part), "{part} not in\n{shown}");
        }
    }

    #[test]
    fn deep_nesting_is_refused_before_it_can_hurt() {
        for unit in ["a.", "[", "{a="] {
            let text = format!(
                "x = {}\n{}a = 1\n",
                unit.repeat(100_000),
                unit.repeat(100_000)
            );
            let diagnostics = read(Doc::parse("f.toml", text.as_bytes())).unwrap_err();
            assert!(
                diagnostics.to_string().len() < 100_000,
                "most are counted, not shown"
            );
        }
        let mut doc = Doc::empty();
        doc.set(&format!("{}=1", vec!["a"; 100_000].join(".")));
        doc.set(&format!("plant.rate={}", "[".repeat(100_000)));
        assert!(read(doc).is_err());
    }

    #[test]
    fn effective_settings_read_back_to_the_same_value() {
        let (plant, settings) = read(Doc::parse("f.toml", GOOD.as_bytes())).unwrap();
        let printed = settings.to_toml();
        let (again, _) = read(Doc::parse("f.toml", printed.as_bytes())).unwrap();
        assert_eq!(plant, again, "{printed}");
        assert!(printed.contains("# f.toml:4"), "{printed}");
        assert!(printed.contains("# lamp is not set"), "{printed}");
    }

    #[test]
    fn a_flood_of_keys_is_refused() {
        let lines = |line: fn(u32) -> String| (0..5000).map(line).collect::<Vec<_>>().concat();
        let parts = lines(|i| format!("[part.p{i}]\n"));
        let strangers = lines(|i| format!("k{i} = 1\n"));
        let shown = errors_of(&format!("{strangers}[plant]\nname = \"a\"\n{parts}"));
        assert!(shown.contains("and 4951 more errors"), "{shown}");
        let shown = errors_of(&format!("[plant]\nname = \"a\"\n{parts}"));
        assert!(
            shown.contains("`part` has 5000 entries, but must have at most 1024"),
            "{shown}"
        );
    }

    #[test]
    fn dots_in_values_are_only_dots() {
        let many = vec!["0.5"; 1000].join(", ");
        let text = format!(
            "[plant]\nname = \"{}\"\n[later]\nx = [{many}]\n",
            ".".repeat(1000)
        );
        let diagnostics = errors_of(&text);
        assert!(
            diagnostics.starts_with("error: f.toml:3:2: `later`"),
            "{diagnostics}"
        );
        assert_eq!(diagnostics.matches("error: ").count(), 1);
    }

    #[test]
    fn keys_of_no_table_are_printed_first() {
        let read = |doc: Doc| {
            doc.read(|root| {
                (
                    root.table("t", |t| t.get("a").or(1u32)),
                    root.get("b").or(2u32),
                )
            })
        };
        let (value, settings) = read(Doc::parse("f.toml", b"b = 5\n[t]\na = 3\n")).unwrap();
        let again = read(Doc::parse("f.toml", settings.to_toml().as_bytes())).unwrap();
        assert_eq!((value, value), ((3, 5), again.0));
    }

    proptest! {
        #[test]
        fn bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), flag in ".{0,40}") {
            let mut doc = Doc::parse("f.toml", &bytes);
            doc.set(&flag);
            let _ = read(doc).map_err(|e| e.to_string());
        }

        #[test]
        fn documents_never_panic(
            lines in prop::collection::vec(
                ("(plant|common|part|part\\.x|event|later|a b|\\[event\\]|name|rate|[a-z.\"]{1,8})",
                 "(=|= *|] *|\\. *)",
                 "(1|-1|1e400|nan|\"x\"|\"|true|\\[1, 2\\]|\\{ rate = 1 \\}|2020-01-01|0x_|é)?",
                 any::<bool>()),
                0..12,
            )
        ) {
            let text: Vec<String> = lines
                .into_iter()
                .map(|(key, equals, value, header)| {
                    if header { format!("[{key}]\n") } else { format!("{key} {equals}{value}\n") }
                })
                .collect();
            let text = text.concat();
            match read(Doc::parse("f.toml", text.as_bytes())) {
                Err(diagnostics) => prop_assert!(diagnostics.len() > 0 && !diagnostics.to_string().is_empty()),
                Ok((plant, settings)) => {
                    let again = read(Doc::parse("f.toml", settings.to_toml().as_bytes()));
                    prop_assert_eq!(plant, again.map_err(|e| e.to_string()).unwrap().0);
                }
            }
        }

        #[test]
        fn any_text_survives_printing(name in any::<String>(), part in any::<String>(), rate in 0.0..10.0f64) {
            let text = format!(
                "[plant]\nname = {}\nrate = {}\n[part.{}]\n",
                name.to_toml(), rate.to_toml(), part.to_toml(),
            );
            let (plant, settings) = read(Doc::parse("f.toml", text.as_bytes())).unwrap();
            prop_assert_eq!(&plant.name, &name);
            prop_assert_eq!(plant.rate, rate);
            let (again, _) = read(Doc::parse("f.toml", settings.to_toml().as_bytes())).unwrap();
            prop_assert_eq!(plant, again);
        }
    }
}
