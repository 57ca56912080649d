//! The answer in sentences, for readers who decide and do not run engines.

use slipstream_base::width;
use slipstream_plan::space;
use slipstream_report::table::{counted, grouped, number};

use super::output::{cost_of, digits, percent};
use super::{Asked, Found};

/// Hours of a mean month.
pub(super) const MONTH_H: f64 = 730.0;

/// What to run, what it costs, how safe that is, and the next choice.
pub(super) fn sentences(context: &Asked, found: &Found) -> String {
    let parts = [
        Some(to_run(context, found)),
        Some(attained(context, found)),
        headroom(found),
        slow_engines(context, found),
        next(context, found),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    parts.join(" ")
}

fn to_run(context: &Asked, found: &Found) -> String {
    let best = &found.best;
    let workers = best.sized.workers;
    let kinds = match best.shape.prefill_share {
        None => counted(u64::from(workers), "worker"),
        Some(share) => {
            let prefill = space::prefill_workers(share, &best.setting, workers);
            format!(
                "{} that compute prompts and {} that answer",
                counted(u64::from(prefill), "worker"),
                workers - prefill
            )
        }
    };
    let each = best.gpus / u64::from(workers.max(1));
    let cost = match best.per_hour(context) {
        Some(cost) => format!(
            " for {cost:.2} per hour ({} per month)",
            grouped(width::round_u64(cost * MONTH_H))
        ),
        None => String::new(),
    };
    format!(
        "Rent {} of type {}, as {kinds} of {} each{cost}.",
        counted(best.gpus, "GPU"),
        best.shape.gpu,
        counted(each, "GPU")
    )
}

fn attained(context: &Asked, found: &Found) -> String {
    let sure = found.sure.as_ref();
    let sure = sure.map_or_else(String::new, |sure| {
        format!(
            ", with a confidence of 95 % {} to {}",
            digits(sure.low),
            percent(sure.high)
        )
    });
    format!(
        "In the simulation {} of the requests are then answered in time ({}){sure}; {} are required.",
        percent(found.best.attained),
        context.objectives,
        percent(context.target)
    )
}

fn headroom(found: &Found) -> Option<String> {
    let (attains, fails) = found.headroom?;
    let more = 100.0 * (attains - 1.0);
    Some(match fails {
        None => format!("Even {more:.0} % more load is served so."),
        Some(_) if more < 0.5 => "There is no room for more load.".to_owned(),
        Some(_) => format!("That holds up to {more:.0} % more load."),
    })
}

/// The answer if engines are slower than predicted, as one in ten measured deployments is.
fn slow_engines(context: &Asked, found: &Found) -> Option<String> {
    found.step_error.as_ref()?;
    let slow = found.sensitivity.iter().find(|knob| knob.slower > 1.0)?;
    let then = match slow.own {
        Some(own) if own.workers <= found.best.sized.workers => "it still suffices".to_owned(),
        Some(own) => format!(
            "it takes {} of this kind ({})",
            counted(u64::from(own.workers), "worker"),
            cost_of(context, own.cost)
        ),
        None => "no number of workers of this kind suffices".to_owned(),
    };
    Some(format!(
        "If the engines are {:.0} % slower than predicted, as one in ten measured deployments is, {then}.",
        100.0 * (slow.slower - 1.0)
    ))
}

fn next(context: &Asked, found: &Found) -> Option<String> {
    let other = found.others.first()?;
    let more = 100.0 * (other.sized.cost / found.best.sized.cost - 1.0);
    let more = if more.is_finite() && more >= 0.5 {
        format!(", {} % more", number(more.round()))
    } else {
        String::new()
    };
    Some(format!(
        "The next choice is {}: {}{more}.",
        other.name(),
        cost_of(context, other.sized.cost)
    ))
}
