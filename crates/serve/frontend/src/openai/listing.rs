//! Descriptions of the server: models, version, health.

use crate::json::{self, Out};

/// A model as `/v1/models` shows it.
#[derive(Clone, Copy, Debug)]
pub struct ModelCard<'a> {
    /// The name that clients send.
    pub id: &'a str,
    /// Where it is stored: the model's name, or an adapter's path.
    pub root: &'a str,
    /// The model that it adapts, if it is an adapter.
    pub parent: Option<&'a str>,
    /// When the server started, Unix time, s.
    pub created: u64,
    /// Prompt plus answer at most, tokens.
    pub max_model_len: u32,
}

impl ModelCard<'_> {
    fn render(&self, out: &mut impl Out) {
        out.put(b"{\"id\":");
        json::string(out, self.id);
        out.put(b",\"object\":\"model\",\"created\":");
        json::integer(out, self.created);
        out.put(b",\"owned_by\":\"slipstream\",\"root\":");
        json::string(out, self.root);
        out.put(b",\"parent\":");
        match self.parent {
            Some(parent) => json::string(out, parent),
            None => out.put(b"null"),
        }
        out.put(b",\"max_model_len\":");
        json::integer(out, u64::from(self.max_model_len));
        out.put(b"}");
    }
}

/// Body of `GET /v1/models`.
pub fn models_json(models: &[ModelCard<'_>]) -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    out.put(b"{\"object\":\"list\",\"data\":[");
    for (at, model) in models.iter().enumerate() {
        if at > 0 {
            out.put(b",");
        }
        model.render(&mut out);
    }
    out.put(b"]}");
    out
}

/// Body of `GET /v1/models/{id}`.
pub fn model_json(model: &ModelCard<'_>) -> Vec<u8> {
    let mut out = Vec::with_capacity(192);
    model.render(&mut out);
    out
}

/// Body of `GET /version`.
pub fn version_json() -> &'static [u8] {
    concat!("{\"version\":\"", env!("CARGO_PKG_VERSION"), "\"}").as_bytes()
}

/// Body of `GET /openapi.json`: every route, in OpenAPI 3.1.
pub fn openapi_json() -> &'static [u8] {
    include_bytes!("../../assets/openapi.json")
}

/// The same without `paths`, which this server does not serve.
pub fn openapi_json_without<'p>(paths: impl Iterator<Item = &'p str>) -> Vec<u8> {
    let mut document: serde_json::Value =
        serde_json::from_slice(openapi_json()).expect("the document is JSON");
    if let Some(all) = document["paths"].as_object_mut() {
        for path in paths {
            all.remove(path);
        }
    }
    serde_json::to_vec(&document).expect("JSON in memory")
}
