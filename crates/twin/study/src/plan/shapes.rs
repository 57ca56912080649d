//! The shapes of a search: every combination of the values of its axes that a cluster file can express and memory can hold.

use slipstream_config::cluster::Dtype;
use slipstream_config::doc::Diagnostics;
use slipstream_config::preset::ModelShape;
use slipstream_plan::Shape;
use slipstream_plan::space;

use super::base::Base;
use super::{Args, Excluded};

/// Formats of the weights to search.
fn formats(args: &Args, model: &ModelShape) -> Vec<Dtype> {
    let stated = args.axes.precisions();
    if !stated.is_empty() {
        return stated;
    }
    // Engines quantize 16 bits to FP8 as they load them; other checkpoints keep their format.
    match model.dtype() {
        Dtype::Bf16 => vec![Dtype::Bf16, Dtype::Fp8],
        checkpoint => vec![checkpoint],
    }
}

/// The axes of the search with their values, in words.
pub(super) fn describe(args: &Args, model: &ModelShape) -> String {
    let axes = args.axes.describe(&formats(args, model));
    format!("searched: {axes}; up to {} GPUs", args.max_gpus)
}

/// Values to search, or `None` to keep the cluster file's.
fn or_as_given<T: Copy>(values: &[T]) -> Vec<Option<T>> {
    if values.is_empty() {
        vec![None]
    } else {
        values.iter().copied().map(Some).collect()
    }
}

/// Every value of an axis on each of the shapes, the shapes in their order.
fn with<T: Clone>(shapes: Vec<Shape>, values: &[T], set: impl Fn(&mut Shape, T)) -> Vec<Shape> {
    let mut all = Vec::with_capacity(shapes.len() * values.len());
    for shape in shapes {
        for value in values {
            let mut shape = shape.clone();
            set(&mut shape, value.clone());
            all.push(shape);
        }
    }
    all
}

/// Every combination of the axes of workers of one kind.
fn combinations(args: &Args, model: &ModelShape) -> Vec<Shape> {
    let axes = &args.axes;
    let first = Shape {
        gpu: String::new(),
        tensor_parallel: 1,
        pipeline_parallel: None,
        data_parallel: None,
        expert_parallel: None,
        dtype: Dtype::Bf16,
        kv_cache: None,
        host_gib: None,
        draft_tokens: None,
        prefill_share: None,
    };
    let mut all = with(vec![first], &axes.gpus, |shape, gpu| {
        shape.gpu = gpu;
    });
    all = with(all, &formats(args, model), |shape, dtype| {
        shape.dtype = dtype;
    });
    all = with(all, &axes.kv_caches(), |shape, dtype| {
        shape.kv_cache = dtype;
    });
    all = with(all, &axes.tensor_parallel, |shape, gpus| {
        shape.tensor_parallel = gpus;
    });
    let stages = or_as_given(&axes.pipeline_parallel);
    all = with(all, &stages, |shape, stages| {
        shape.pipeline_parallel = stages;
    });
    let ranks = or_as_given(&axes.data_parallel);
    all = with(all, &ranks, |shape, ranks| {
        shape.data_parallel = ranks;
    });
    let experts = or_as_given(&axes.expert_parallel);
    all = with(all, &experts, |shape, whole| {
        shape.expert_parallel = whole;
    });
    let memory = or_as_given(&axes.host_memory);
    all = with(all, &memory, |shape, gib| {
        shape.host_gib = gib;
    });
    let drafts = or_as_given(&axes.speculation);
    with(all, &drafts, |shape, tokens| {
        shape.draft_tokens = tokens;
    })
}

/// Every shape that a cluster file can express and memory can hold.
///
/// # Errors
/// If all shapes have the same mistake, which is then one of the cluster file.
pub(super) fn all(
    args: &Args,
    base: &Base,
    model: &ModelShape,
    excluded: &mut Vec<Excluded>,
) -> anyhow::Result<Vec<Shape>> {
    let mut shapes = Vec::new();
    let mut common: Option<Diagnostics> = None;
    let setting = &space::settings(&args.axes, false).0[0];
    for shape in combinations(args, model) {
        let gpus = shape.tensor_parallel;
        let mut exclude = |reason: String| {
            let name = shape.name();
            excluded.push(Excluded { name, reason });
        };
        if !model.divides_into(gpus) {
            exclude(format!("{} does not split into {gpus}", model.name));
            continue;
        }
        let engine = match base.resolve(&shape, setting, 1) {
            Ok((cluster, _)) => cluster.pools[0].engine.clone(),
            Err(diagnostics) => {
                let first = diagnostics.iter().next().map(|m| m.message.clone());
                common.get_or_insert(diagnostics);
                exclude(first.unwrap_or_default());
                continue;
            }
        };
        // One GPU has whole experts in either case.
        let alone = engine.gpus() == 1;
        if alone && shape.expert_parallel == Some(true) && args.axes.expert_parallel.len() > 1 {
            continue;
        }
        for is_apart in args.axes.disaggregated() {
            shapes.push(Shape {
                prefill_share: is_apart.then_some(0.5),
                ..shape.clone()
            });
        }
    }
    let of_file = |diagnostics: &Diagnostics| {
        let message = diagnostics.iter().next().map(|m| m.message.as_str());
        excluded.len() > 1
            && excluded
                .iter()
                .all(|shape| Some(shape.reason.as_str()) == message)
    };
    match common {
        Some(diagnostics) if shapes.is_empty() && of_file(&diagnostics) => Err(diagnostics.into()),
        _ => Ok(shapes),
    }
}
