//! Whether all of a schema is modelled.
//!
//! Source: JSON Schema, draft 2020-12, "A Vocabulary for Structural Validation". Keywords that constrain a value
//! and that are not modelled are refused by name, wherever in the schema they stand. Other unknown keywords are
//! annotations, as the specification has it.

use crate::keywords::{FORMATS, TYPES, number};
use crate::{DEPTH_MAX, FormError, Rng, STEPS_MAX, Tree, pattern};

/// Keywords that constrain values, and that are not modelled.
const REFUSED: [&str; 15] = [
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "patternProperties",
    "propertyNames",
    "contains",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
];

/// Bytes of the patterns of a schema, all together, at most.
const PATTERNS_BYTES_MAX: usize = 4 << 10;

/// Why a pattern next to a format is refused.
pub(crate) const PATTERN_AND_FORMAT: &str =
    "`pattern` together with `format` is not modelled; drop one";

/// Checks that all of `schema` is modelled.
///
/// # Errors
/// [`FormError`] with the first thing that is not.
pub fn check_schema(schema: &Tree) -> Result<(), FormError> {
    let mut check = Check {
        steps: 0,
        pattern_bytes: 0,
        path: Vec::new(),
    };
    check.schema(schema, 0)
}

struct Check {
    steps: u32,
    pattern_bytes: usize,
    path: Vec<String>,
}

impl Check {
    fn error(&self, message: impl Into<String>) -> FormError {
        FormError::at(&self.path, message)
    }

    fn below(&mut self, name: &str, schema: &Tree, depth: u32) -> Result<(), FormError> {
        self.path.push(name.into());
        self.schema(schema, depth + 1)?;
        self.path.pop();
        Ok(())
    }

    fn schema(&mut self, schema: &Tree, depth: u32) -> Result<(), FormError> {
        self.steps += 1;
        if self.steps > STEPS_MAX || depth > DEPTH_MAX {
            return Err(self.error(format!(
                "the schema has more than {STEPS_MAX} subschemas, or more than {DEPTH_MAX} levels"
            )));
        }
        let members = match schema {
            Tree::Object(members) => members,
            Tree::Bool(_) => return Ok(()),
            other => {
                return Err(self.error(format!(
                    "a schema must be an object or a boolean, not {}",
                    other.type_name()
                )));
            }
        };
        for (name, value) in members {
            if REFUSED.contains(&name.as_str()) {
                let message = format!("the keyword `{name}` of JSON Schema is not modelled");
                return Err(self.error(message));
            }
            if !self.subschemas(name, value, depth)? {
                self.demand(name, value, schema)?;
            }
        }
        Ok(())
    }

    /// Checks the schemas that keyword `name` has as its value. False if its value is none.
    fn subschemas(&mut self, name: &str, value: &Tree, depth: u32) -> Result<bool, FormError> {
        match name {
            "properties" | "$defs" | "definitions" => {
                let Tree::Object(schemas) = value else {
                    return Err(self.error(format!("`{name}` must be an object")));
                };
                self.path.push(name.into());
                for (property, schema) in schemas {
                    self.below(property, schema, depth)?;
                }
                self.path.pop();
            }
            "items" if matches!(value, Tree::Array(_)) => {
                let message = "an array as `items` is of an older draft; use `prefixItems`";
                return Err(self.error(message));
            }
            "items" | "additionalProperties" | "unevaluatedProperties" => {
                self.below(name, value, depth)?;
            }
            "anyOf" | "oneOf" | "allOf" | "prefixItems" => {
                let schemas = match value {
                    Tree::Array(schemas) if !schemas.is_empty() => schemas,
                    _ => {
                        let message = format!("`{name}` must be an array that is not empty");
                        return Err(self.error(message));
                    }
                };
                self.path.push(name.into());
                for (at, schema) in schemas.iter().enumerate() {
                    self.below(&at.to_string(), schema, depth)?;
                }
                self.path.pop();
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Checks the value of keyword `name` of `schema`, which has no schemas in it.
    fn demand(&mut self, name: &str, value: &Tree, schema: &Tree) -> Result<(), FormError> {
        let is_number =
            |holds: fn(f64) -> bool| matches!(value, Tree::Number(n) if holds(number(n)));
        let (right, expected) = match name {
            "$ref" => {
                let to = value.as_text().unwrap_or_default();
                if to == "#" || to.starts_with("#/") {
                    return Ok(());
                }
                let message = "`$ref` must point into the schema itself, as `#/$defs/name`";
                return Err(self.error(message));
            }
            "type" => return self.types(value),
            "pattern" if value.as_text().is_some() => {
                return self.pattern(value.as_text().unwrap_or_default(), schema);
            }
            "required" => (
                matches!(value, Tree::Array(names) if names.iter().all(|n| n.as_text().is_some())),
                "an array of strings",
            ),
            "enum" => (matches!(value, Tree::Array(_)), "an array"),
            "uniqueItems" => (matches!(value, Tree::Bool(_)), "a boolean"),
            "pattern" | "format" => (value.as_text().is_some(), "a string"),
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties"
            | "maxProperties" => (
                is_number(|n| n >= 0.0 && n.fract() == 0.0),
                "a whole number from 0",
            ),
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
                (is_number(|_| true), "a number")
            }
            "multipleOf" => (is_number(|n| n > 0.0), "a number above 0"),
            _ => return Ok(()),
        };
        if right {
            return Ok(());
        }
        Err(self.malformed(name, expected, value))
    }

    fn pattern(&mut self, text: &str, schema: &Tree) -> Result<(), FormError> {
        let format = schema.get("format").and_then(Tree::as_text);
        if format.is_some_and(|format| FORMATS.contains(&format)) {
            return Err(self.error(PATTERN_AND_FORMAT));
        }
        self.steps += 32; // it takes as long as so many subschemas
        self.pattern_bytes += text.len();
        if self.pattern_bytes > PATTERNS_BYTES_MAX {
            return Err(self.error(format!(
                "the patterns of the schema have more than {PATTERNS_BYTES_MAX} bytes"
            )));
        }
        pattern::matching(text, &mut Rng::new(0))
            .map_err(|reason| self.error(format!("the pattern {text:?} {reason}")))?;
        Ok(())
    }

    /// The error for keyword `name` with a value of the wrong type.
    fn malformed(&self, name: &str, expected: &str, value: &Tree) -> FormError {
        let mut found = String::new();
        match value {
            Tree::Bool(_) | Tree::Number(_) | Tree::Null => value.write(&mut found),
            other => found.push_str(other.type_name()),
        }
        self.error(format!("`{name}` must be {expected}, not {found}"))
    }

    fn types(&self, value: &Tree) -> Result<(), FormError> {
        let known = |one: &Tree| one.as_text().is_some_and(|name| TYPES.contains(&name));
        let right = match value {
            Tree::Array(some) => !some.is_empty() && some.iter().all(known),
            one => known(one),
        };
        if right {
            return Ok(());
        }
        let message = format!(
            "`type` must be one of {}, or some of them",
            TYPES.join(", ")
        );
        Err(self.error(message))
    }
}
