//! Families of metrics as tables, and the one encoder that writes them.
//!
//! A collector has a table of [`Family`] rows: name, help, kind, and how its samples are read.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// A family of metrics that is read from a `T`.
#[derive(Debug)]
pub struct Family<T> {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    /// Whether the page has the family.
    is_shown: fn(&T) -> bool,
    read: fn(&T, &mut Samples<'_>),
}

impl<T> Family<T> {
    /// A counter; the page appends `_total` to `name`.
    pub const fn counter(
        name: &'static str,
        help: &'static str,
        read: fn(&T, &mut Samples<'_>),
    ) -> Family<T> {
        Family::of(name, help, MetricType::Counter, read)
    }

    /// A gauge.
    pub const fn gauge(
        name: &'static str,
        help: &'static str,
        read: fn(&T, &mut Samples<'_>),
    ) -> Family<T> {
        Family::of(name, help, MetricType::Gauge, read)
    }

    /// A histogram.
    pub const fn histogram(
        name: &'static str,
        help: &'static str,
        read: fn(&T, &mut Samples<'_>),
    ) -> Family<T> {
        Family::of(name, help, MetricType::Histogram, read)
    }

    const fn of(
        name: &'static str,
        help: &'static str,
        kind: MetricType,
        read: fn(&T, &mut Samples<'_>),
    ) -> Family<T> {
        Family {
            name,
            help,
            kind,
            is_shown: |_| true,
            read,
        }
    }

    /// The same family, on the page only if `is_shown`.
    #[must_use]
    pub const fn only_if(self, is_shown: fn(&T) -> bool) -> Family<T> {
        Family { is_shown, ..self }
    }
}

/// Writes the families of `table` with the samples of `source`.
///
/// # Errors
/// The page cannot be written.
pub fn encode<T>(
    table: &[Family<T>],
    source: &T,
    encoder: &mut DescriptorEncoder<'_>,
) -> fmt::Result {
    for family in table.iter().filter(|family| (family.is_shown)(source)) {
        let metric = encoder.encode_descriptor(family.name, family.help, None, family.kind)?;
        let mut samples = Samples {
            metric,
            kind: family.kind,
            outcome: Ok(()),
        };
        (family.read)(source, &mut samples);
        samples.outcome?;
    }
    Ok(())
}

/// Takes the samples of one family.
#[derive(Debug)]
pub struct Samples<'e> {
    metric: MetricEncoder<'e>,
    kind: MetricType,
    outcome: fmt::Result,
}

impl Samples<'_> {
    /// Adds the sample of `labels`, of a counter or a gauge.
    pub fn add(&mut self, labels: &[(&str, &str)], value: u64) {
        match self.kind {
            MetricType::Counter => self.write(labels, |metric| {
                metric.encode_counter::<NoLabelSet, u64, f64>(&value, None)
            }),
            _ => self.add_real(labels, value as f64),
        }
    }

    /// Adds the sample of `labels`, of a gauge.
    pub fn add_real(&mut self, labels: &[(&str, &str)], value: f64) {
        self.write(labels, |metric| metric.encode_gauge(&value));
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
    use prometheus_client::collector::Collector;
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::*;

    #[derive(Debug)]
    struct Load(u64);

    const TABLE: &[Family<Load>] = &[
        Family::counter("a", "Plain", |of, samples| samples.add(&[], of.0)),
        Family::gauge("b", "Labeled", |of, samples| {
            samples.add(&[("x", "1"), ("y", "\"")], of.0);
            samples.add_real(&[("x", "2"), ("y", "")], 0.5);
        }),
        Family::counter("c", "Absent", |of: &Load, samples| samples.add(&[], of.0))
            .only_if(|of| of.0 > 7),
        Family::histogram("d", "Spread", |of, samples| {
            samples.add_histogram(&[("x", "1")], 2.5, &[(1.0, of.0), (f64::INFINITY, 1)]);
        }),
    ];

    impl Collector for Load {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            super::encode(TABLE, self, &mut encoder)
        }
    }

    #[test]
    fn each_family_of_a_table_is_written_in_its_kind() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Load(7)));
        let mut page = String::new();
        text::encode(&mut page, &registry).unwrap();
        assert_eq!(
            page,
            "# HELP a Plain\n# TYPE a counter\na_total 7\n\
             # HELP b Labeled\n# TYPE b gauge\nb{x=\"1\",y=\"\\\"\"} 7.0\nb{x=\"2\",y=\"\"} 0.5\n\
             # HELP d Spread\n# TYPE d histogram\nd_sum{x=\"1\"} 2.5\nd_count{x=\"1\"} 8\n\
             d_bucket{le=\"1.0\",x=\"1\"} 7\nd_bucket{le=\"+Inf\",x=\"1\"} 8\n# EOF\n"
        );
    }
}
