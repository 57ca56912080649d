//! The models of all engines.

use std::collections::BTreeMap;
use std::sync::Arc;

use slipstream_base::{BlockHash, WorkerId};

/// A model as an engine lists it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Model {
    pub(super) id: String,
    /// `owned_by`.
    pub(super) owner: String,
    /// Its entry of `data`.
    card: serde_json::Value,
}

/// The models in the answer to `GET /v1/models`; `None` if it is not such an answer.
pub(super) fn parse_models(body: &[u8]) -> Option<Vec<Model>> {
    let answer: serde_json::Value = serde_json::from_slice(body).ok()?;
    let models = answer.get("data")?.as_array()?.iter().filter_map(|card| {
        Some(Model {
            id: card.get("id")?.as_str()?.to_owned(),
            owner: card
                .get("owned_by")
                .and_then(|owner| owner.as_str())
                .unwrap_or_default()
                .to_owned(),
            card: card.clone(),
        })
    });
    Some(models.collect())
}

/// Where a model is served.
#[derive(Clone, Debug)]
pub(super) struct Served {
    /// The engines, in rising order; `None`: all that have listed models.
    pub(super) only: Option<Arc<[WorkerId]>>,
    /// Root of the hashes of its prompts.
    pub(super) root: BlockHash,
    card: serde_json::Value,
}

/// Which engines serve which model.
#[derive(Clone, Debug, Default)]
pub(super) struct Catalog {
    models: BTreeMap<String, Served>,
}

impl Catalog {
    /// Tokens of prompt and answer that `model` takes, or the only model; `None`: its engines do not say.
    pub(super) fn model_len(&self, model: Option<&str>) -> Option<u64> {
        let served = match model {
            Some(model) => self.models.get(model)?,
            None => self
                .models
                .values()
                .next()
                .filter(|_| self.models.len() == 1)?,
        };
        served.card.get("max_model_len")?.as_u64()
    }

    /// From the models of each engine, in rising order. An engine without models has not been reached, and
    /// takes no requests.
    pub(super) fn new(engines: impl Iterator<Item = (WorkerId, Arc<[Model]>)>) -> Catalog {
        let mut by_id: BTreeMap<String, (Vec<WorkerId>, serde_json::Value)> = BTreeMap::new();
        let mut reached = 0;
        for (worker, models) in engines {
            reached += usize::from(!models.is_empty());
            for model in models.iter() {
                let (workers, _) = by_id
                    .entry(model.id.clone())
                    .or_insert_with(|| (Vec::new(), model.card.clone()));
                if workers.last() != Some(&worker) {
                    workers.push(worker);
                }
            }
        }
        let served = by_id.into_iter().map(|(id, (workers, card))| {
            let served = Served {
                root: BlockHash::root(&id, "", ""),
                only: (workers.len() < reached).then(|| workers.into()),
                card,
            };
            (id, served)
        });
        Catalog {
            models: served.collect(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.models.is_empty()
    }

    pub(super) fn get(&self, model: &str) -> Option<&Served> {
        self.models.get(model)
    }

    /// The LoRA adapter of `base` that `model` is; empty for `base` itself, by any of its names. `None` for
    /// another model.
    pub(super) fn adapter<'m>(&self, base: &str, model: Option<&'m str>) -> Option<&'m str> {
        let Some(model) = model.filter(|&model| model != base) else {
            return Some("");
        };
        let field = |model: &str, name: &str| {
            let value = self.get(model)?.card.get(name)?.as_str()?;
            Some(value.to_owned())
        };
        if let Some(parent) = field(model, "parent") {
            return (parent == base).then_some(model);
        }
        let root = field(model, "root")?;
        (field(base, "root")? == root).then_some("")
    }

    pub(super) fn names(&self) -> Vec<&str> {
        self.models.keys().map(String::as_str).collect()
    }

    /// The answer to `GET /v1/models`.
    pub(super) fn list(&self) -> Vec<u8> {
        let cards: Vec<&serde_json::Value> = self.models.values().map(|of| &of.card).collect();
        let list = serde_json::json!({"object": "list", "data": cards});
        list.to_string().into_bytes()
    }

    /// The answer to `GET /v1/models/MODEL`.
    pub(super) fn card(&self, model: &str) -> Option<Vec<u8>> {
        Some(self.get(model)?.card.to_string().into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_merged_and_name_their_engines() {
        let of = |text: &str| -> Arc<[Model]> { parse_models(text.as_bytes()).unwrap().into() };
        let both =
            of(r#"{"data":[{"id":"base","owned_by":"vllm","max_model_len":9},{"id":"lora"}]}"#);
        let one = of(r#"{"data":[{"id":"base","max_model_len":10}]}"#);
        let none: Arc<[Model]> = Arc::new([]);
        let engines = [(WorkerId(0), both), (WorkerId(1), none), (WorkerId(2), one)];
        let catalog = Catalog::new(engines.into_iter());
        assert_eq!(catalog.names(), ["base", "lora"]);
        assert!(catalog.get("base").unwrap().only.is_none());
        let lora = catalog.get("lora").unwrap();
        assert_eq!(lora.only.as_deref(), Some(&[WorkerId(0)][..]));
        let list = String::from_utf8(catalog.list()).unwrap();
        assert!(list.contains("\"max_model_len\":9"), "{list}");
        assert!(!list.contains("\"max_model_len\":10"), "{list}");
        let cards = of(
            r#"{"data":[{"id":"base","root":"/w"},{"id":"alias","root":"/w"},{"id":"lora","parent":"base"},
                {"id":"theirs","parent":"x"},{"id":"other","root":"/x"},{"id":"bare"}]}"#,
        );
        let catalog = Catalog::new([(WorkerId(0), cards)].into_iter());
        let adapter = |model| catalog.adapter("base", model);
        assert_eq!(adapter(None), Some(""));
        assert_eq!(adapter(Some("base")), Some(""));
        assert_eq!(adapter(Some("alias")), Some(""));
        assert_eq!(adapter(Some("lora")), Some("lora"));
        for model in ["theirs", "other", "bare", "unknown"] {
            assert_eq!(adapter(Some(model)), None, "{model}");
        }
        assert!(parse_models(b"<html>").is_none() && parse_models(b"{}").is_none());
    }
}
