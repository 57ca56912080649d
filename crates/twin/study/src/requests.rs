//! The requests of a simulated run as columns.

use std::time::Instant;

use slipstream_base::SimTime;
use slipstream_report::series::Ended;
use slipstream_report::{PassRecord, Series};
use slipstream_twin::{Observed, Progress, RequestRecord, Sink};

use crate::columns::Column;
use crate::control::Control;

/// Decides how many workers a pool with the policy `custom` needs.
pub trait Recommend {
    /// The number for `pool` in the state `observed` at `now`; `wanted` are wanted now. `None`: there is none, and the run
    /// ends soon.
    fn recommend(
        &mut self,
        pool: &str,
        now: SimTime,
        observed: &Observed,
        wanted: u32,
    ) -> Option<u32>;
}

/// Receives a run's requests.
///
/// A request takes about 135 bytes. Latencies are those of the report, and absent for requests that failed.
pub struct Requests<'a> {
    control: &'a Control,
    function: Option<&'a mut dyn Recommend>,
    /// The function has no number any more.
    failed: bool,
    last: Instant,
    keeps: bool,
    columns: Vec<Column>,
    series: Option<Series>,
}

/// Names of the columns, in order, with their types.
fn columns() -> Vec<Column> {
    vec![
        Column::text("id"),
        Column::u32("class"),
        Column::f64("due_s"),
        Column::f64("wait_ms"),
        Column::f64("ttft_ms"),
        Column::f64("tpot_ms"),
        Column::f64("e2e_ms"),
        Column::u32("input_tokens"),
        Column::u32("cached_tokens"),
        Column::u32("output_tokens"),
        Column::u32("worker"),
        Column::u32("prefill_worker"),
        Column::u32("preemptions"),
        Column::u32("retries"),
        Column::text("status"),
        Column::u32("model"),
    ]
}

impl<'a> Requests<'a> {
    /// Without any request yet. `keeps`: whether requests are wanted; `series`: the run over time, if it is.
    pub fn new(control: &'a Control, keeps: bool, series: Option<Series>) -> Requests<'a> {
        Requests {
            control,
            function: None,
            failed: false,
            last: Instant::now(),
            keeps,
            columns: columns(),
            series,
        }
    }

    /// With a function that decides about pools with the policy `custom`.
    #[must_use]
    pub fn with_function(mut self, function: Option<&'a mut dyn Recommend>) -> Requests<'a> {
        self.function = function;
        self
    }

    /// The columns, and the run over time.
    pub fn finish(self) -> (Vec<Column>, Option<Series>) {
        (self.columns, self.series)
    }
}

/// A request for the run over time.
pub fn ended(record: &RequestRecord<'_>) -> Ended {
    Ended {
        due: record.request.due.0,
        first: record.first.0,
        last: record.last.0,
        input_tokens: record.input_tokens.into(),
        cached_tokens: record.cached_tokens.into(),
        output_tokens: record.output_tokens.into(),
        ok: record.error.is_none(),
    }
}

fn ms(from: SimTime, to: SimTime) -> f64 {
    to.since(from) as f64 / 1e6
}

impl Sink for Requests<'_> {
    fn wants_requests(&self) -> bool {
        self.keeps || self.series.is_some()
    }

    fn on_request(&mut self, record: &RequestRecord<'_>) {
        if let Some(series) = &mut self.series {
            series.on_request(&ended(record));
        }
        if !self.keeps {
            return;
        }
        let due = record.request.due;
        let is_whole = record.error.is_none();
        let whole = |value: f64| is_whole.then_some(value);
        let gaps = record.output_tokens.saturating_sub(1);
        let tpot = (gaps > 0).then(|| ms(record.first, record.last) / f64::from(gaps));
        let [
            id,
            class,
            due_s,
            wait,
            ttft,
            per_token,
            e2e,
            input,
            cached,
            output,
            worker,
            prefill_worker,
            preemptions,
            retries,
            status,
            model,
        ] = &mut self.columns[..]
        else {
            unreachable!("the columns are these");
        };
        id.push_text(Some(&record.request.name()));
        class.push_u32(Some(record.request.class));
        due_s.push_f64(Some(due.as_secs_f64()));
        wait.push_f64(whole(ms(due, record.admitted)));
        ttft.push_f64(whole(ms(due, record.first)));
        per_token.push_f64(tpot.filter(|_| is_whole));
        e2e.push_f64(whole(ms(due, record.last)));
        input.push_u32(Some(record.input_tokens));
        cached.push_u32(Some(record.cached_tokens));
        output.push_u32(Some(record.output_tokens));
        worker.push_u32(record.rank.map(|rank| rank.worker.0));
        prefill_worker.push_u32(record.prefill_rank.map(|rank| rank.worker.0));
        preemptions.push_u32(Some(record.preemptions));
        retries.push_u32(Some(record.retries));
        model.push_u32(Some(record.request.model));
        status.push_text(Some(record.error.map_or("ok", |error| error.kind)));
    }

    fn wants_passes(&self) -> bool {
        self.series.is_some()
    }

    fn on_pass(&mut self, pass: &PassRecord<'_>) {
        if let Some(series) = &mut self.series {
            series.on_pass(pass);
        }
    }

    fn on_progress(&mut self, progress: Progress) -> bool {
        if self.last.elapsed().as_millis() >= 100 {
            self.last = Instant::now();
            self.control.show(|| {
                format!(
                    "{} s simulated, {} ended, {} in flight",
                    slipstream_report::table::number(progress.now.as_secs_f64()),
                    slipstream_report::table::counted(progress.ended, "request"),
                    progress.in_flight
                )
            });
        }
        !self.control.is_interrupted() && !self.failed
    }

    fn recommends(&self) -> bool {
        self.function.is_some()
    }

    fn recommend(&mut self, pool: &str, now: SimTime, observed: &Observed, wanted: u32) -> u32 {
        let Some(function) = self.function.as_mut().filter(|_| !self.failed) else {
            return wanted;
        };
        let number = function.recommend(pool, now, observed, wanted);
        self.failed = number.is_none();
        number.unwrap_or(wanted)
    }
}
