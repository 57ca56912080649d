//! A JSON value that keeps the order of its members.

use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

use crate::Number;

/// A JSON value. Schemas, tools and arguments are shown to models in the order in which clients wrote them, so
/// objects are lists of members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tree {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// A number.
    Number(Number),
    /// A string.
    Text(String),
    /// An array.
    Array(Vec<Tree>),
    /// An object; names are not repeated.
    Object(Vec<(String, Tree)>),
}

impl Tree {
    /// The value of member `name`, if this is an object that has one.
    pub fn get(&self, name: &str) -> Option<&Tree> {
        match self {
            Tree::Object(members) => members.iter().find(|(n, _)| n == name).map(|m| &m.1),
            _ => None,
        }
    }

    /// The string, if it is one.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Tree::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Its type, as JSON Schema names types.
    pub fn type_name(&self) -> &'static str {
        match self {
            Tree::Null => "null",
            Tree::Bool(_) => "boolean",
            Tree::Number(_) => "number",
            Tree::Text(_) => "string",
            Tree::Array(_) => "array",
            Tree::Object(_) => "object",
        }
    }

    /// The value as JSON without spaces.
    pub fn to_json(&self) -> Vec<u8> {
        let mut out = String::new();
        self.write_with([",", ":"], &mut out);
        out.into_bytes()
    }

    /// Appends it as Python's `json.dumps` writes it: a space behind `,` and `:`. Templates and models write
    /// JSON in this way.
    pub fn write(&self, out: &mut String) {
        self.write_with([", ", ": "], out);
    }

    fn write_with(&self, between: [&str; 2], out: &mut String) {
        match self {
            Tree::Null => out.push_str("null"),
            Tree::Bool(true) => out.push_str("true"),
            Tree::Bool(false) => out.push_str("false"),
            Tree::Number(number) => out.push_str(&number.to_string()),
            Tree::Text(text) => write_text(text, out),
            Tree::Array(elements) => {
                out.push('[');
                for (at, element) in elements.iter().enumerate() {
                    if at > 0 {
                        out.push_str(between[0]);
                    }
                    element.write_with(between, out);
                }
                out.push(']');
            }
            Tree::Object(members) => {
                out.push('{');
                for (at, (name, value)) in members.iter().enumerate() {
                    if at > 0 {
                        out.push_str(between[0]);
                    }
                    write_text(name, out);
                    out.push_str(between[1]);
                    value.write_with(between, out);
                }
                out.push('}');
            }
        }
    }
}

impl From<serde_json::Value> for Tree {
    fn from(value: serde_json::Value) -> Tree {
        match value {
            serde_json::Value::Null => Tree::Null,
            serde_json::Value::Bool(value) => Tree::Bool(value),
            serde_json::Value::Number(number) => Tree::Number(number.into()),
            serde_json::Value::String(text) => Tree::Text(text),
            serde_json::Value::Array(elements) => {
                Tree::Array(elements.into_iter().map(Tree::from).collect())
            }
            serde_json::Value::Object(members) => {
                let members = members.into_iter();
                Tree::Object(members.map(|(name, value)| (name, value.into())).collect())
            }
        }
    }
}

/// Appends `text` as a JSON string.
pub fn write_text(text: &str, out: &mut String) {
    out.push_str(&serde_json::to_string(text).expect("a string is written to memory"));
}

impl Serialize for Tree {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Tree::Null => to.serialize_unit(),
            Tree::Bool(value) => to.serialize_bool(*value),
            Tree::Number(number) => number.serialize(to),
            Tree::Text(text) => to.serialize_str(text),
            Tree::Array(elements) => {
                let mut seq = to.serialize_seq(Some(elements.len()))?;
                for element in elements {
                    seq.serialize_element(element)?;
                }
                seq.end()
            }
            Tree::Object(members) => {
                let mut map = to.serialize_map(Some(members.len()))?;
                for (name, value) in members {
                    map.serialize_entry(name, value)?;
                }
                map.end()
            }
        }
    }
}
