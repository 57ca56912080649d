//! Declarations of the keys of a file, one per key: its name, type, unit, bounds, default, meaning and pitfall. The reader, the
//! default of its struct and its row of the documentation follow from the declaration.
//!
//! [`section!`] declares the keys of a table. A key's doc comment is its documentation: the first paragraph is its
//! meaning, the second one the effect of a value that is too low or too high.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use super::table::{Field, Scalar, Table};

/// A key with values of type `T`, and what holds without one: [`DefaultValue`] or [`NoDefault`].
pub(crate) struct Key<T: 'static, D = DefaultValue<T>> {
    name: &'static str,
    /// Its doc comment, by lines.
    doc: &'static str,
    reader: ValueReader<T>,
    limits: Vec<Limit<T>>,
    without: D,
    unit: &'static str,
    /// Set by [`within`](Key::within).
    range: Option<RangeInclusive<T>>,
    bounds: Option<String>,
    note: &'static str,
    /// Replaces unit, bounds and note.
    description: Option<&'static str>,
    /// Replaces the default.
    default_text: Option<&'static str>,
}

/// A key that always has a value.
pub(crate) struct DefaultValue<T> {
    default: T,
    /// Set if the key is required: the default only lets the reading continue.
    remedy: Option<&'static str>,
}

/// A key that may have no value.
pub(crate) struct NoDefault;

/// How a value is read, and written as TOML.
enum ValueReader<T: 'static> {
    Scalar(ScalarReader<T>, fn(&T) -> String),
    Choice(ChoiceReader<T>, Words<T>, fn(&T, Words<T>) -> &'static str),
    /// It is a table, whose keys are declared elsewhere.
    Table,
}

type Words<T> = &'static [(&'static str, T)];
type ScalarReader<T> = for<'t> fn(&'t Table<'_>, &str) -> Field<'t, T>;
type ChoiceReader<T> = for<'t> fn(&'t Table<'_>, &str, Words<T>) -> Field<'t, T>;
type Limit<T> = Box<dyn for<'t> Fn(Field<'t, T>) -> Field<'t, T>>;

/// A key's row in the documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Path, such as `engine.block_size`; `NAME` stands for any name.
    pub path: String,
    /// Type, unit and bounds.
    pub value: String,
    /// Default as TOML; `None`: it is not a constant.
    pub default: Option<String>,
    /// In words, what holds without the key, if that is not a constant.
    pub otherwise: Option<&'static str>,
    /// Its meaning.
    pub meaning: String,
    /// Effect of a value that is too low or too high, or wrong.
    pub pitfall: String,
}

/// The table of `rows` in Markdown.
#[cfg(test)]
pub(crate) fn markdown_table(rows: &[Row]) -> String {
    let mut out =
        "| key | value | default | meaning | when it is off |\n| --- | --- | --- | --- | --- |\n"
            .to_owned();
    for row in rows {
        let constant = row.default.as_ref().map(|default| format!("`{default}`"));
        let default = constant.or(row.otherwise.map(str::to_owned));
        let cells = [
            format!("`{}`", row.path.rsplit('.').next().unwrap_or_default()),
            row.value.clone(),
            default.unwrap_or_default(),
            row.meaning.clone(),
            row.pitfall.clone(),
        ];
        out += "| ";
        out += &cells.join(" | ");
        out += " |\n";
    }
    out
}

fn get<'t, T: Scalar + 'static>(t: &'t Table<'_>, key: &str) -> Field<'t, T> {
    t.get(key)
}

fn choose<'t, T: Clone + PartialEq>(t: &'t Table<'_>, key: &str, words: Words<T>) -> Field<'t, T> {
    t.choice(key, words)
}

fn get_path<'t>(t: &'t Table<'_>, key: &str) -> Field<'t, PathBuf> {
    t.path(key)
}

fn word<T: PartialEq>(value: &T, words: Words<T>) -> &'static str {
    let found = words.iter().find(|(_, of)| of == value);
    found.map_or("", |(word, _)| word)
}

/// A value, by default `default`.
pub(crate) fn value<T: Scalar>(default: T) -> Key<T> {
    Key::of(
        ValueReader::Scalar(get, T::to_toml),
        DefaultValue::default_of(default),
    )
}

/// A text, by default `default`.
pub(crate) fn text(default: &str) -> Key<String> {
    value(default.to_owned())
}

/// A value that must be set. `remedy` says so; `stand_in` lets the reading continue.
pub(crate) fn required<T: Scalar>(remedy: &'static str, stand_in: T) -> Key<T> {
    Key::of(
        ValueReader::Scalar(get, T::to_toml),
        DefaultValue::required(remedy, stand_in),
    )
}

/// A value that may be missing.
pub(crate) fn optional<T: Scalar>() -> Key<T, NoDefault> {
    Key::of(ValueReader::Scalar(get, T::to_toml), NoDefault)
}

/// One of `words`, by default that of `default`.
pub(crate) fn choice<T: Clone + PartialEq>(words: Words<T>, default: T) -> Key<T> {
    Key::of(
        ValueReader::Choice(choose, words, word),
        DefaultValue::default_of(default),
    )
}

/// One of `words`, as [`required`].
pub(crate) fn required_choice<T: Clone + PartialEq>(
    words: Words<T>,
    remedy: &'static str,
    stand_in: T,
) -> Key<T> {
    let reader = ValueReader::Choice(choose, words, word);
    Key::of(reader, DefaultValue::required(remedy, stand_in))
}

/// One of `words`, as [`optional`].
pub(crate) fn optional_choice<T: Clone + PartialEq>(words: Words<T>) -> Key<T, NoDefault> {
    Key::of(ValueReader::Choice(choose, words, word), NoDefault)
}

/// A path that may be missing. In a file, it starts from the file's folder.
pub(crate) fn path() -> Key<PathBuf, NoDefault> {
    Key::of(
        ValueReader::Scalar(get_path, |path| path_to_toml(path)),
        NoDefault,
    )
    .unit("path")
}

/// A path that must be set.
pub(crate) fn required_path(remedy: &'static str) -> Key<PathBuf> {
    let reader = ValueReader::Scalar(get_path, |path| path_to_toml(path));
    Key::of(reader, DefaultValue::required(remedy, PathBuf::new())).unit("path")
}

/// A table of another kind in this one, for the documentation alone.
pub(crate) fn subtable() -> Key<(), NoDefault> {
    Key::of(ValueReader::Table, NoDefault).unit("table")
}

fn path_to_toml(path: &Path) -> String {
    path.to_string_lossy().into_owned().to_toml()
}

impl<T> DefaultValue<T> {
    fn default_of(default: T) -> DefaultValue<T> {
        DefaultValue {
            default,
            remedy: None,
        }
    }

    fn required(remedy: &'static str, stand_in: T) -> DefaultValue<T> {
        DefaultValue {
            default: stand_in,
            remedy: Some(remedy),
        }
    }
}

impl<T, D> Key<T, D> {
    fn of(reader: ValueReader<T>, without: D) -> Key<T, D> {
        Key {
            name: "",
            doc: "",
            reader,
            limits: Vec::new(),
            without,
            unit: "",
            range: None,
            bounds: None,
            note: "",
            description: None,
            default_text: None,
        }
    }

    /// Set by [`section!`].
    pub(crate) fn declared(self, name: &'static str, doc: &'static str) -> Key<T, D> {
        Key { name, doc, ..self }
    }

    /// The unit, or the thing that is counted: precedes the bounds in the documentation.
    pub(crate) fn unit(self, unit: &'static str) -> Key<T, D> {
        Key { unit, ..self }
    }

    /// A condition: follows the bounds in the documentation.
    pub(crate) fn note(self, note: &'static str) -> Key<T, D> {
        Key { note, ..self }
    }

    /// The accepted values in words, if unit, bounds and note do not say them.
    pub(crate) fn with_description(self, text: &'static str) -> Key<T, D> {
        Key {
            description: Some(text),
            ..self
        }
    }

    /// The default in words, if that depends on other keys.
    pub(crate) fn with_default_text(self, words: &'static str) -> Key<T, D> {
        Key {
            default_text: Some(words),
            ..self
        }
    }

    /// Requires a value in `range`.
    pub(crate) fn within(mut self, range: RangeInclusive<T>) -> Key<T, D>
    where
        T: Scalar + PartialOrd + Display + Clone,
    {
        self.bounds = Some(shown_bounds(range.start(), range.end()));
        self.range = Some(range.clone());
        self.limits
            .push(Box::new(move |field| field.within(range.clone())));
        self
    }

    /// Requires a value of `low` or more.
    pub(crate) fn at_least(mut self, low: T) -> Key<T, D>
    where
        T: Scalar + PartialOrd + Display + Clone,
    {
        self.bounds = Some(format!("{} or more", low.to_toml()));
        self.limits
            .push(Box::new(move |field| field.within(low.clone()..)));
        self
    }

    /// Its name.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// The range of its values, if it has one.
    pub(crate) fn range(&self) -> Option<&RangeInclusive<T>> {
        self.range.as_ref()
    }

    /// Requires `ok` of a value; `must` completes "but must be …".
    pub(crate) fn check(mut self, ok: fn(&T) -> bool, must: &'static str) -> Key<T, D> {
        self.limits
            .push(Box::new(move |field| field.check(ok, must)));
        self
    }

    /// The field in `t`, for values whose further bounds or default depend on other keys.
    pub(crate) fn field<'t>(&self, t: &'t Table<'_>) -> Field<'t, T> {
        let field = match self.reader {
            ValueReader::Scalar(get, _) => get(t, self.name),
            ValueReader::Choice(choose, words, _) => choose(t, self.name, words),
            ValueReader::Table => unreachable!("`{}` is no value", self.name),
        };
        self.limits.iter().fold(field, |field, limit| limit(field))
    }

    /// The field in `t` as one of `words`, which come from elsewhere in the file.
    pub(crate) fn choice_field<'t, U: Clone + PartialEq>(
        &self,
        t: &'t Table<'_>,
        words: &'t [(&'t str, U)],
    ) -> Field<'t, U> {
        t.choice(self.name, words)
    }

    fn row_without(&self, table: &str, default: Option<String>) -> Row {
        let mut paragraphs = self.doc.split("\n\n").map(|lines| {
            let lines: Vec<&str> = lines.lines().map(str::trim).collect();
            lines.join(" ").trim().to_owned()
        });
        let default = default.filter(|_| self.default_text.is_none());
        Row {
            path: match table {
                "" => self.name.to_owned(),
                table => format!("{table}.{}", self.name),
            },
            value: self.accepted_values(),
            otherwise: default
                .is_none()
                .then(|| self.default_text.unwrap_or("none")),
            default,
            meaning: paragraphs.next().unwrap_or_default(),
            pitfall: paragraphs.next().unwrap_or_default(),
        }
    }

    /// The accepted values, in words.
    fn accepted_values(&self) -> String {
        if let Some(text) = self.description {
            return text.to_owned();
        }
        let bounds = match &self.reader {
            ValueReader::Choice(_, words, _) => {
                let words: Vec<String> = words.iter().map(|(w, _)| format!("\"{w}\"")).collect();
                let (last, others) = words.split_last().expect("a choice has words");
                Some(format!("{} or {last}", others.join(", ")))
            }
            ValueReader::Scalar(..) if std::any::type_name::<T>() == "bool" => {
                Some("true or false".into())
            }
            ValueReader::Scalar(..) | ValueReader::Table => self.bounds.clone(),
        };
        let unit = (!self.unit.is_empty()).then(|| self.unit.to_owned());
        let what: Vec<String> = unit.into_iter().chain(bounds).collect();
        let note = (!self.note.is_empty()).then(|| self.note.to_owned());
        let all: Vec<String> = [what.join(", ")].into_iter().chain(note).collect();
        all.join("; ")
    }
}

impl<T: Clone> Key<T> {
    /// The value in `t`, or the default.
    pub(crate) fn read(&self, t: &Table<'_>) -> T {
        self.finish(self.field(t))
    }

    /// The value of `field`, or the default.
    pub(crate) fn finish(&self, field: Field<'_, T>) -> T {
        let default = self.without.default.clone();
        match self.without.remedy {
            None => field.or(default),
            Some(remedy) => field.required(remedy, default),
        }
    }

    /// The value in `t`, which must also be `ok`; `must` completes "but must be …".
    pub(crate) fn read_if(&self, t: &Table<'_>, ok: impl FnOnce(&T) -> bool, must: &str) -> T {
        self.finish(self.field(t).check(ok, must))
    }

    /// The default.
    pub(crate) fn default(&self) -> T {
        self.without.default.clone()
    }

    /// The row of the key in the table called `table`.
    pub(crate) fn row(&self, table: &str) -> Row {
        let default = &self.without.default;
        let text = match self.reader {
            ValueReader::Scalar(_, to_toml) => to_toml(default),
            ValueReader::Choice(_, words, word) => word(default, words).to_owned().to_toml(),
            ValueReader::Table => String::new(),
        };
        let is_constant = self.without.remedy.is_none();
        self.row_without(table, is_constant.then_some(text))
    }
}

impl<T> Key<T, NoDefault> {
    /// The value in `t`, if there is one.
    pub(crate) fn read(&self, t: &Table<'_>) -> Option<T> {
        self.field(t).optional()
    }

    /// The row of the key in the table called `table`.
    pub(crate) fn row(&self, table: &str) -> Row {
        self.row_without(table, None)
    }
}

/// `low to high`. Large powers of ten of numbers with a fraction are written as such.
fn shown_bounds<T: Scalar>(low: &T, high: &T) -> String {
    const POWER_MIN: f64 = 1e9;
    let power = |value: &T, least: f64| {
        let text = value.to_toml();
        let number: f64 = text.parse().unwrap_or(0.0);
        let power = format!("{number:e}");
        let is_power = text.contains(['.', 'e']) && power.starts_with("1e") && number >= least;
        is_power.then_some(power)
    };
    let plain = |value: &T| grouped(value.to_toml().trim_end_matches(".0"));
    let high_power = power(high, POWER_MIN);
    let low_least = if high_power.is_some() { 1e3 } else { POWER_MIN };
    let low = power(low, low_least).unwrap_or_else(|| plain(low));
    format!("{low} to {}", high_power.unwrap_or_else(|| plain(high)))
}

/// `number` with commas between groups of three digits before the point.
fn grouped(number: &str) -> String {
    let (digits, fraction) = number.split_once('.').unwrap_or((number, ""));
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if !fraction.is_empty() {
        out.push('.');
        out.push_str(fraction);
    }
    out
}

/// A table of a file as a struct with a field per key.
pub(crate) trait Section: Default {
    /// Reads its keys in the order in which they are declared.
    fn read(t: &Table<'_>) -> Self;
}

/// Declares the keys of a table, and the struct that they are read into.
///
/// ```text
/// section! {
///     /// `[router]`.
///     pub struct RouterConfig, keys RouterKeys of "router", read in order {
///         /// Weight of blocks left to prefill against active blocks.
///         ///
///         /// Low: only load counts. High: popular prefixes overload one worker.
///         prefill_weight: f64 = value(4.0).within(0.0..=1e6);
///     }
/// }
/// ```
///
/// | entry | makes |
/// | --- | --- |
/// | `name: T = KEY;` | a key, and a field with its value |
/// | `name?: T = KEY;` | a key that may be missing, and a field of type `Option<T>` |
/// | `key name: T = KEY;`, `key name?: T = KEY;` | a key |
/// | `field name: T = DEFAULT;` | a field |
/// | `field name: T = DEFAULT => READ;` | a field that `READ(t)` makes of keys |
///
/// `RouterKeys::prefill_weight()` is the [`Key`], and `RouterKeys::rows()` has the documentation of all. The struct has
/// [`Default`], and [`Section`] if it is `read in order`; otherwise it is `read by hand`. `keys RouterKeys of "router"
/// { … }` makes no struct; all of its entries begin with `key`.
macro_rules! section {
    ($(#[$meta:meta])* $vis:vis struct $Struct:ident, keys $Keys:ident of $table:literal, read $in:ident $order:ident
        { $($entries:tt)* }) => {
        $crate::doc::section!(@next [$(#[$meta])* ($vis) $Struct $in $Keys $table] [] [] [] [] $($entries)*);
    };
    (keys $Keys:ident of $table:literal { $($entries:tt)* }) => {
        $crate::doc::section!(@next [$Keys $table] [] [] [] [] $($entries)*);
    };

    // Moves one entry after the other into the lists of fields, their values, functions of keys, and names of keys.
    (@next $head:tt [$($fields:tt)*] [$($values:tt)*] [$($keys:tt)*] [$($names:tt)*]
        $(#[doc = $doc:literal])+ key $name:ident : $T:ty = $key:expr; $($rest:tt)*) => {
        $crate::doc::section!(@next $head [$($fields)*] [$($values)*]
            [$($keys)* {$name ($crate::doc::Key<$T>) ($key) ($($doc)+)}] [$($names)* $name] $($rest)*);
    };
    (@next $head:tt [$($fields:tt)*] [$($values:tt)*] [$($keys:tt)*] [$($names:tt)*]
        $(#[doc = $doc:literal])+ key $name:ident ? : $T:ty = $key:expr; $($rest:tt)*) => {
        $crate::doc::section!(@next $head [$($fields)*] [$($values)*]
            [$($keys)* {$name ($crate::doc::Key<$T, $crate::doc::NoDefault>) ($key) ($($doc)+)}]
            [$($names)* $name] $($rest)*);
    };
    (@next $head:tt [$($fields:tt)*] [$($values:tt)*] $keys:tt $names:tt
        $(#[doc = $doc:literal])+ field $name:ident : $T:ty = $default:expr; $($rest:tt)*) => {
        $crate::doc::section!(@next $head [$($fields)* $(#[doc = $doc])+ pub $name: $T,]
            [$($values)* {$name field ($default)}] $keys $names $($rest)*);
    };
    (@next $head:tt [$($fields:tt)*] [$($values:tt)*] $keys:tt $names:tt
        $(#[doc = $doc:literal])+ field $name:ident : $T:ty = $default:expr => $read:expr; $($rest:tt)*) => {
        $crate::doc::section!(@next $head [$($fields)* $(#[doc = $doc])+ pub $name: $T,]
            [$($values)* {$name field ($default) ($read)}] $keys $names $($rest)*);
    };
    (@next $head:tt [$($fields:tt)*] [$($values:tt)*] $keys:tt $names:tt
        $(#[doc = $doc:literal])+ $name:ident : $T:ty = $key:expr; $($rest:tt)*) => {
        $crate::doc::section!(@next $head [$($fields)* $(#[doc = $doc])+ pub $name: $T,]
            [$($values)* {$name key}] $keys $names $(#[doc = $doc])+ key $name: $T = $key; $($rest)*);
    };
    (@next $head:tt [$($fields:tt)*] [$($values:tt)*] $keys:tt $names:tt
        $(#[doc = $doc:literal])+ $name:ident ? : $T:ty = $key:expr; $($rest:tt)*) => {
        $crate::doc::section!(@next $head [$($fields)* $(#[doc = $doc])+ pub $name: Option<$T>,]
            [$($values)* {$name optional}] $keys $names $(#[doc = $doc])+ key $name?: $T = $key; $($rest)*);
    };

    (@next [$(#[$meta:meta])* ($vis:vis) $Struct:ident $in:ident $Keys:ident $table:literal]
        [$($fields:tt)*] [$({$field:ident $($value:tt)+})*] $keys:tt $names:tt) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $Struct {
            $($fields)*
        }

        impl Default for $Struct {
            fn default() -> Self {
                $Struct { $($field: $crate::doc::section!(@default $Keys $field $($value)+)),* }
            }
        }

        $crate::doc::section!(@section $in $Struct $Keys [$({$field $($value)+})*]);
        $crate::doc::section!(@next [$Keys $table] [] [] $keys $names);
    };
    (@next [$Keys:ident $table:literal] [] []
        [$({$key:ident ($Key:ty) ($value:expr) ($($doc:literal)+)})*] [$($name:ident)*]) => {
        /// Keys of the table.
        pub(crate) struct $Keys;

        impl $Keys {
            $(pub(crate) fn $key() -> $Key {
                $value.declared(stringify!($key), concat!($($doc, "\n"),+))
            })*

            /// Names of all keys.
            #[allow(dead_code, reason = "few tables have keys that are only used together")]
            pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];

            pub(crate) fn rows() -> Vec<$crate::doc::Row> {
                vec![$($Keys::$name().row($table)),*]
            }
        }
    };

    (@section in $Struct:ident $Keys:ident [$({$field:ident $($value:tt)+})*]) => {
        impl $crate::doc::Section for $Struct {
            fn read(t: &$crate::doc::Table<'_>) -> Self {
                $Struct { $($field: $crate::doc::section!(@read t $Keys $field $($value)+)),* }
            }
        }
    };
    (@section by $Struct:ident $Keys:ident $values:tt) => {};

    (@default $Keys:ident $name:ident key) => { $Keys::$name().default() };
    (@default $Keys:ident $name:ident optional) => { None };
    (@default $Keys:ident $name:ident field ($default:expr) $(($read:expr))?) => { $default };
    (@read $t:ident $Keys:ident $name:ident field ($default:expr)) => { $default };
    (@read $t:ident $Keys:ident $name:ident field ($default:expr) ($read:expr)) => { $read($t) };
    (@read $t:ident $Keys:ident $name:ident $key:ident) => { $Keys::$name().read($t) };
}
pub(crate) use section;

#[cfg(test)]
mod tests {
    use super::super::Doc;
    use super::*;

    const WORDS: &[(&str, u8)] = &[("one", 1), ("two", 2), ("three", 3)];

    section! {
        /// `[plant]`.
        struct Plant, keys PlantKeys of "plant", read in order {
            /// Liters of water
            /// per day.
            ///
            /// Low: it dries.
            water: f64 = value(1.5).within(0.0..=1e9).unit("l");
            /// Its name.
            name: String = required("name it", String::new()).check(|n| !n.is_empty(), "a name");
            /// Its size.
            size: u8 = choice(WORDS, 2).note("needed in autumn");
            /// Where its picture is.
            picture?: PathBuf = path();
            /// When it was
            /// planted.
            key year: u32 = value(1999).within(1_900..=2_100).with_default_text("that of `garden`");
            /// Its age.
            field age: u32 = 0 => |t: &Table<'_>| 2_026 - PlantKeys::year().read(t);
            /// Whether it is green.
            green: bool = value(true);
        }
    }

    fn read(text: &str) -> Result<(Plant, String), String> {
        let doc = Doc::parse("f.toml", text.as_bytes());
        let read = doc.read(|root| root.table("plant", Plant::read));
        read.map(|(plant, settings)| (plant, settings.to_toml()))
            .map_err(|e| e.to_string())
    }

    #[test]
    fn a_declaration_reads_documents_and_has_defaults() {
        let (plant, printed) = read("[plant]\nname = \"oak\"\nyear = 2000\n").unwrap();
        let expected = Plant {
            name: "oak".into(),
            age: 26,
            ..Plant::default()
        };
        assert_eq!(plant, expected);
        let keys: Vec<&str> = (printed.lines().skip(1))
            .map(|line| line.trim_start_matches("# ").split(' ').next().unwrap())
            .collect();
        assert_eq!(keys, ["water", "name", "size", "picture", "year", "green"]);
        let rows: Vec<Vec<String>> = (PlantKeys::rows().into_iter())
            .map(|row| {
                let without = row
                    .default
                    .or(row.otherwise.map(|words| format!("({words})")));
                vec![
                    row.path,
                    row.value,
                    without.unwrap(),
                    row.meaning,
                    row.pitfall,
                ]
            })
            .collect();
        let row = |texts: [&str; 5]| texts.map(str::to_owned).to_vec();
        let words = "\"one\", \"two\" or \"three\"; needed in autumn";
        assert_eq!(
            rows,
            [
                row([
                    "plant.water",
                    "l, 0 to 1e9",
                    "1.5",
                    "Liters of water per day.",
                    "Low: it dries."
                ]),
                row(["plant.name", "", "(none)", "Its name.", ""]),
                row(["plant.size", words, "\"two\"", "Its size.", ""]),
                row([
                    "plant.picture",
                    "path",
                    "(none)",
                    "Where its picture is.",
                    ""
                ]),
                row([
                    "plant.year",
                    "1,900 to 2,100",
                    "(that of `garden`)",
                    "When it was planted.",
                    ""
                ]),
                row([
                    "plant.green",
                    "true or false",
                    "true",
                    "Whether it is green.",
                    ""
                ]),
            ]
        );
    }

    #[test]
    fn bounds_and_checks_are_enforced() {
        let error = read("[plant]\nname = \"\"\nwater = -1\nsize = \"too\"\n").unwrap_err();
        assert_eq!(
            error,
            "f.toml:2:8: `plant.name` is \"\", but must be a name\n\
             error: f.toml:3:9: `plant.water` is -1.0, but must be 0 to 1000000000\n\
             error: f.toml:4:8: `plant.size` is a string (\"too\"), but must be one of \"one\", \"two\", \"three\"\n\
             hint: did you mean \"two\"?"
        );
        let error = read("").unwrap_err();
        assert_eq!(error, "`plant.name` is missing\nhint: name it");
    }

    #[test]
    fn bounds_are_written_as_people_do() {
        for (low, high, shown) in [
            (0.0, 1e6, "0 to 1,000,000"),
            (0.001, 31_622_400.0, "0.001 to 31,622,400"),
            (0.0, 1e12, "0 to 1e12"),
            (1e6, 1e13, "1e6 to 1e13"),
            (1e3, 1e16, "1e3 to 1e16"),
            (0.01, 1.0, "0.01 to 1"),
        ] {
            assert_eq!(shown_bounds(&low, &high), shown);
        }
        assert_eq!(
            shown_bounds(&0_u64, &3_600_000_000_000),
            "0 to 3,600,000,000,000"
        );
        assert_eq!(shown_bounds(&1_u32, &(1 << 24)), "1 to 16,777,216");
    }
}
