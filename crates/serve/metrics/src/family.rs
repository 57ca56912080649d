//! Families of metrics as tables, and the one encoder that writes them.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use slipstream_base::count::{Histogram, MergedHistogram};

/// A family of metrics that is read from a `T`.
#[derive(Debug)]
pub struct Family<T> {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    is_in_seconds: bool,
    /// Whether the page has the family.
    is_shown: fn(&T) -> bool,
    read: Read<T>,
}

/// How a family's samples are read.
#[derive(Debug)]
enum Read<T> {
    /// One sample without labels.
    One(fn(&T) -> u64),
    Each(fn(&T, &mut Samples<'_>)),
}

impl<T> Family<T> {
    /// A counter with one sample, which has no labels; the page appends `_total` to `name`.
    pub const fn total(name: &'static str, help: &'static str, read: fn(&T) -> u64) -> Family<T> {
        Family::of(name, help, MetricType::Counter, Read::One(read))
    }

    /// A counter; the page appends `_total` to `name`.
    pub const fn counter(
        name: &'static str,
        help: &'static str,
        read: fn(&T, &mut Samples<'_>),
    ) -> Family<T> {
        Family::of(name, help, MetricType::Counter, Read::Each(read))
    }

    /// A gauge.
    pub const fn gauge(
        name: &'static str,
        help: &'static str,
        read: fn(&T, &mut Samples<'_>),
    ) -> Family<T> {
        Family::of(name, help, MetricType::Gauge, Read::Each(read))
    }

    /// A histogram.
    pub const fn histogram(
        name: &'static str,
        help: &'static str,
        read: fn(&T, &mut Samples<'_>),
    ) -> Family<T> {
        Family::of(name, help, MetricType::Histogram, Read::Each(read))
    }

    const fn of(
        name: &'static str,
        help: &'static str,
        kind: MetricType,
        read: Read<T>,
    ) -> Family<T> {
        Family {
            name,
            help,
            kind,
            is_in_seconds: false,
            is_shown: |_| true,
            read,
        }
    }

    /// The same family, on the page only if `is_shown`.
    #[must_use]
    pub const fn only_if(self, is_shown: fn(&T) -> bool) -> Family<T> {
        Family { is_shown, ..self }
    }

    /// The same family with the unit of seconds, which the page appends to its name.
    #[must_use]
    pub const fn in_seconds(self) -> Family<T> {
        Family {
            is_in_seconds: true,
            ..self
        }
    }

    fn encode(&self, source: &T, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let unit = self.is_in_seconds.then_some(&Unit::Seconds);
        let mut samples = Samples {
            name: self.name,
            metric: encoder.encode_descriptor(self.name, self.help, unit, self.kind)?,
            kind: self.kind,
            outcome: Ok(()),
        };
        match self.read {
            Read::One(read) => samples.add(&[], read(source)),
            Read::Each(read) => read(source, &mut samples),
        }
        samples.outcome
    }
}

/// A collector of the families of `table`, whose samples are those of one `scrape` of `source`.
pub fn collector<S, T>(
    source: S,
    scrape: fn(&S) -> T,
    table: &'static [Family<T>],
) -> Box<dyn Collector>
where
    S: Send + Sync + 'static,
    T: 'static,
{
    Box::new(Table {
        source,
        scrape,
        families: table,
    })
}

struct Table<S, T: 'static> {
    source: S,
    scrape: fn(&S) -> T,
    families: &'static [Family<T>],
}

impl<S, T> fmt::Debug for Table<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.families.iter().map(|family| family.name);
        f.debug_list().entries(names).finish()
    }
}

impl<S: Send + Sync + 'static, T> Collector for Table<S, T> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let source = (self.scrape)(&self.source);
        self.families
            .iter()
            .filter(|family| (family.is_shown)(&source))
            .try_for_each(|family| family.encode(&source, &mut encoder))
    }
}

/// Takes the samples of one family.
#[derive(Debug)]
pub struct Samples<'e> {
    name: &'static str,
    metric: MetricEncoder<'e>,
    kind: MetricType,
    outcome: fmt::Result,
}

impl Samples<'_> {
    /// The family's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Adds the sample of `labels`, of a counter or a gauge.
    pub fn add(&mut self, labels: &[(&str, &str)], value: u64) {
        match self.kind {
            MetricType::Counter => self.write(labels, |metric| {
                metric.encode_counter::<NoLabelSet, u64, f64>(&value, None)
            }),
            _ => self.add_real(labels, value as f64),
        }
    }

    /// Adds the sample of `labels`, of a counter or a gauge, which the page shows with decimals.
    pub fn add_real(&mut self, labels: &[(&str, &str)], value: f64) {
        match self.kind {
            MetricType::Counter => self.write(labels, |metric| {
                metric.encode_counter::<NoLabelSet, f64, f64>(&value, None)
            }),
            _ => self.write(labels, |metric| metric.encode_gauge(&value)),
        }
    }

    /// Adds the sample of `labels`, of a gauge, which the page shows without decimals.
    pub fn add_integer(&mut self, labels: &[(&str, &str)], value: i64) {
        self.write(labels, |metric| metric.encode_gauge(&value));
    }

    /// Adds the sample of `labels`, of a histogram: the sum of `parts`, whose unit is `per_unit` times smaller than the
    /// page's.
    pub fn add_merged<'h>(
        &mut self,
        labels: &[(&str, &str)],
        parts: impl IntoIterator<Item = &'h Histogram>,
        per_unit: f64,
    ) {
        let merged = MergedHistogram::of(parts, per_unit);
        self.add_histogram(labels, merged.sum, &merged.buckets);
    }

    /// Adds the sample of `labels`, of a histogram: the sum of the observations, and each bucket's upper bound and count.
    pub fn add_histogram(&mut self, labels: &[(&str, &str)], sum: f64, buckets: &[(f64, u64)]) {
        let count = buckets.iter().map(|(_, count)| count).sum();
        self.write(labels, |metric| {
            metric.encode_histogram::<NoLabelSet>(sum, count, buckets, None)
        });
    }

    fn write(
        &mut self,
        labels: &[(&str, &str)],
        encode: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
    ) {
        if self.outcome.is_ok() {
            self.outcome = if labels.is_empty() {
                encode(&mut self.metric) // without braces
            } else {
                let family = self.metric.encode_family(&labels);
                family.and_then(|mut metric| encode(&mut metric))
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::*;

    const TABLE: &[Family<u64>] = &[
        Family::total("a", "Plain", |of| *of),
        Family::gauge("b", "Labeled", |of, samples| {
            samples.add(&[("x", "1"), ("y", "\"")], *of);
            samples.add_real(&[("x", "2"), ("y", "")], 0.5);
            let name = samples.name();
            samples.add_integer(&[("x", "3"), ("y", name)], -1);
        }),
        Family::total("c", "Absent", |of| *of).only_if(|of| *of > 7),
        Family::histogram("d", "Spread", |of, samples| {
            samples.add_histogram(&[("x", "1")], 2.5, &[(1.0, *of), (f64::INFINITY, 1)]);
        }),
        Family::counter("e", "Time", |of, samples| samples.add_real(&[], *of as f64)).in_seconds(),
    ];

    #[test]
    fn each_family_of_a_table_is_written_in_its_kind() {
        let mut registry = Registry::default();
        registry.register_collector(collector(6_u64, |of| of + 1, TABLE));
        let mut page = String::new();
        text::encode(&mut page, &registry).unwrap();
        assert_eq!(
            page,
            "# HELP a Plain\n# TYPE a counter\na_total 7\n\
             # HELP b Labeled\n# TYPE b gauge\nb{x=\"1\",y=\"\\\"\"} 7.0\nb{x=\"2\",y=\"\"} 0.5\nb{x=\"3\",y=\"b\"} -1\n\
             # HELP d Spread\n# TYPE d histogram\nd_sum{x=\"1\"} 2.5\nd_count{x=\"1\"} 8\n\
             d_bucket{le=\"1.0\",x=\"1\"} 7\nd_bucket{le=\"+Inf\",x=\"1\"} 8\n\
             # HELP e_seconds Time\n# TYPE e_seconds counter\n# UNIT e_seconds seconds\ne_seconds_total 7.0\n# EOF\n"
        );
    }
}
