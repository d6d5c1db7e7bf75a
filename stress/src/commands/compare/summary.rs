//! The rows: programs under some options, and the means, maxima and totals of all programs.

use crate::commands::fit::Job;
use crate::commands::replay::Run;
use crate::commands::{hundredths, options, ratio};
use crate::row::{Row, row};
use crate::table::{Table, bytes, factor, ms, number, optional, tenths};

row! {
    /// Options without --config: backing:pytorch and backing:expandable (models of PyTorch's default
    /// allocator, and of that with expandable segments), backing:segments, and backing:paged.
    /// split_frames is off by default; where split_frames:on makes a difference for one of the programs,
    /// the key with_split_frames has the same row with it, and the table another row; else it is null.
    /// The device is simulated, even where there is a GPU, unless --device names the GPU: then limits of
    /// several sizes are used.
    ///
    /// JSON keys, per program and config; unknown figures are null
    #[derive(Default)]
    pub(super) struct Compared {
        /// "trace"
        pub(super) row: &'static str,
        /// the program
        pub(super) trace: String,
        /// the options
        pub(super) config: String => ["options", |row| options(&row.config)],
        /// the size of the smallest device, as found by `fit`; null if there is none
        pub(super) smallest_device_bytes: Option<u64> => ["smallest device", bytes],
        /// its ratio to peak_requested_bytes
        pub(super) smallest_over_requested: Option<f64> => ["smallest device, ratio", factor],
        #[serde(flatten)]
        pub(super) run: Run,
        /// driver calls of the first pass
        pub(super) driver_calls: Option<u64>,
        /// the most memory that the program had requested and not yet freed
        pub(super) peak_requested_bytes: u64,
        /// ratio of what the first pass held
        pub(super) first_pass_reserved_over_requested: Option<f64>
            => ["holds, first pass", |row| factor(row.run.served(row.first_pass_reserved_over_requested))],
    }
}

impl Compared {
    /// A run, with the size of the smallest device.
    pub(super) fn new(job: &Job<'_>, smallest_device_bytes: Option<u64>, run: Run) -> Compared {
        let requested = job.program.peak_requested_bytes;
        let first = run.peak_reserved_bytes_by_pass.first();
        Compared {
            row: "trace",
            trace: job.name.to_owned(),
            config: job.config.text.clone(),
            smallest_device_bytes,
            smallest_over_requested: smallest_device_bytes.and_then(|bytes| ratio(bytes, requested)),
            driver_calls: run.calls,
            peak_requested_bytes: requested,
            first_pass_reserved_over_requested: first.and_then(|&held| ratio(held, requested)),
            run,
        }
    }
}

row! {
    /// And per config, at the end; means, maxima and totals are null unless the figure is known for each
    /// program that finished, and if there are none
    #[derive(PartialEq)]
    pub(super) struct Summary {
        /// "mean"
        row: &'static str,
        /// the options
        pub(super) config: String => ["options", |row| options(&row.config)],
        /// the number of programs
        traces: u64,
        /// how many of them finished, without ooms in any pass; the others count only for
        /// smallest_over_requested, ooms, warm_ooms and violations
        finished: u64,
        /// geometric mean
        pub(super) reserved_over_requested: Option<f64> => ["holds, ratio", factor],
        /// maximum
        worst_reserved_over_requested: Option<f64> => ["holds, worst", factor],
        /// total
        ooms: u64
            => ["unfinished", |row| row.traces - row.finished]
            => ["OOMs", |row| row.ooms.saturating_add(row.warm_ooms)],
        /// total
        warm_ooms: u64,
        /// total
        violations: u64 => ["violations"],
        /// geometric mean
        smallest_over_requested: Option<f64> => ["smallest device, ratio", factor],
        /// total
        driver_calls: Option<u64> => ["driver calls", optional],
        /// total
        pub(super) driver_time_modelled_us: Option<f64> => ["driver ms, modelled", ms],
        /// geometric mean
        ns_per_op: Option<f64> => ["ns/op", tenths],
        /// total
        warm_driver_calls: Option<f64> => ["later driver calls", tenths],
        /// total
        warm_driver_time_modelled_us: Option<f64> => ["later driver ms, modelled", ms],
        /// maximum
        worst_smallest_over_requested: Option<f64> => ["smallest device, worst", factor],
        /// geometric mean
        first_pass_reserved_over_requested: Option<f64> => ["holds, first pass", factor],
        /// maximum
        worst_alloc_us: Option<f64> => ["worst µs, modelled", |row| number(row.worst_alloc_us, 0)],
        /// geometric mean of ns_per_op over yardstick_ns_per_op
        times_yardstick: Option<f64> => ["times yardstick", |row| number(row.times_yardstick, 2)],
        /// total
        allocs: Option<u64>,
    }
}

/// A summary for each of the options, in the order in which they first appear.
pub(super) fn summaries(rows: &[Compared]) -> Vec<Summary> {
    let mut configs: Vec<&str> = Vec::new();
    for row in rows {
        if !configs.contains(&row.config.as_str()) {
            configs.push(&row.config);
        }
    }
    let of = |config| rows.iter().filter(|row| row.config == config).collect::<Vec<_>>();
    configs.into_iter().map(|config| summarise(config, &of(config))).collect()
}

fn summarise(config: &str, rows: &[&Compared]) -> Summary {
    // A program that did not finish took less memory and time than it needs. The smallest device is
    // known nevertheless.
    let finished: Vec<&Compared> = rows.iter().copied().filter(|row| row.run.refused() == 0).collect();
    let mean = |figure| all(&finished, figure).and_then(|figures| geometric_mean(&figures));
    let worst = |figure| all(&finished, figure).and_then(|figures| figures.into_iter().max_by(f64::total_cmp));
    let sum = |figure| all(&finished, figure).map(|figures| hundredths(figures.iter().sum()));
    let smallest = all(rows, |row| row.smallest_over_requested);
    Summary {
        row: "mean",
        config: config.to_owned(),
        traces: rows.len() as u64,
        finished: finished.len() as u64,
        reserved_over_requested: mean(|row| row.run.reserved_over_requested),
        worst_reserved_over_requested: worst(|row| row.run.reserved_over_requested),
        first_pass_reserved_over_requested: mean(|row| row.first_pass_reserved_over_requested),
        smallest_over_requested: smallest.as_deref().and_then(geometric_mean),
        worst_smallest_over_requested: smallest.and_then(|figures| figures.into_iter().max_by(f64::total_cmp)),
        allocs: total(&finished, |row| Some(row.run.allocs)),
        driver_calls: total(&finished, |row| row.driver_calls),
        warm_driver_calls: sum(|row| row.run.warm_driver_calls),
        driver_time_modelled_us: sum(|row| row.run.driver_time_modelled_us),
        warm_driver_time_modelled_us: sum(|row| row.run.warm_driver_time_modelled_us),
        worst_alloc_us: worst(|row| row.run.worst_alloc_us),
        ns_per_op: mean(|row| row.run.ns_per_op).map(hundredths),
        times_yardstick: mean(|row| row.run.times_yardstick()).map(hundredths),
        ooms: total(rows, |row| Some(row.run.ooms)).unwrap_or(0),
        warm_ooms: total(rows, |row| Some(row.run.warm_ooms)).unwrap_or(0),
        violations: total(rows, |row| Some(row.run.violations)).unwrap_or(0),
    }
}

/// A figure of all these programs; `None` unless all have it, as a mean over some of them does not
/// compare with one over all.
fn all<F>(rows: &[&Compared], figure: fn(&Compared) -> Option<F>) -> Option<Vec<F>> {
    let figures = rows.iter().map(|row| figure(row)).collect::<Option<Vec<F>>>();
    figures.filter(|figures| !figures.is_empty())
}

/// A saturating sum.
fn total(rows: &[&Compared], count: fn(&Compared) -> Option<u64>) -> Option<u64> {
    all(rows, count).map(|counts| counts.into_iter().fold(0, u64::saturating_add))
}

/// The geometric mean of positive numbers; of one number, that number to the last digit.
#[expect(clippy::cast_precision_loss, reason = "a handful of programs")]
fn geometric_mean(figures: &[f64]) -> Option<f64> {
    let positive = figures.iter().all(|&figure| figure > 0.0 && figure.is_finite());
    match figures {
        &[figure] if positive => Some(figure),
        [_, ..] if positive => {
            Some((figures.iter().map(|figure| figure.ln()).sum::<f64>() / figures.len() as f64).exp())
        }
        _ => None,
    }
}

pub(super) fn tabulate(summaries: &[Summary]) -> Table {
    let programs = summaries.iter().map(|row| row.traces).max().unwrap_or(0);
    let title = format!("All {programs} programs: geometric means, the worst, and totals of driver calls and OOMs:");
    Summary::table(summaries).grouped(summaries.iter().map(|_| title.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(trace: &str, config: &str, reserved: f64, smallest: Option<f64>) -> Compared {
        let run = Run {
            reserved_over_requested: Some(reserved),
            allocs: 1000,
            warm_driver_calls: Some(0.5),
            driver_time_modelled_us: Some(10.0),
            worst_alloc_us: Some(reserved),
            ns_per_op: Some(40.0),
            yardstick_ns_per_op: Some(20.0),
            ..Run::default()
        };
        let (trace, config) = (trace.to_owned(), config.to_owned());
        Compared { trace, config, smallest_over_requested: smallest, driver_calls: Some(5), run, ..Compared::default() }
    }

    /// The same row of a program that was refused some requests in the first pass and in later ones.
    fn refused(row: Compared, ooms: u64, warm_ooms: u64) -> Compared {
        Compared { run: Run { ooms, warm_ooms, ..row.run }, ..row }
    }

    #[test]
    fn each_config_has_its_means() {
        let rows = [row("a", "x", 1.0, Some(2.0)), row("a", "y", 3.0, None), row("b", "x", 4.0, None)];
        let [x, y] = &summaries(&rows)[..] else { panic!("two configs") };
        assert_eq!((x.config.as_str(), x.traces, y.config.as_str(), y.traces), ("x", 2, "y", 1));
        assert!((x.reserved_over_requested.unwrap_or_default() - 2.0).abs() < 1e-9);
        assert_eq!((x.worst_reserved_over_requested, x.worst_alloc_us), (Some(4.0), Some(4.0)));
        assert_eq!((x.smallest_over_requested, x.warm_driver_time_modelled_us), (None, None), "not known for all");
        assert_eq!((x.allocs, x.driver_calls, x.warm_driver_calls, x.ooms), (Some(2000), Some(10), Some(1.0), 0));
        assert_eq!((x.driver_time_modelled_us, x.times_yardstick), (Some(20.0), Some(2.0)));
    }

    #[test]
    fn programs_that_did_not_finish_are_in_no_mean() {
        let failed = |trace, config| refused(row(trace, config, 0.5, Some(2.0)), 3, 0);
        let failed_later = refused(row("a", "y", 0.5, Some(2.0)), 0, 1);
        let rows = [row("a", "x", 1.5, Some(2.0)), failed("b", "x"), failed("a", "y"), failed_later];
        let [x, y] = &summaries(&rows)[..] else { panic!("two configs") };
        assert_eq!((x.traces, x.finished, x.ooms, x.allocs, x.driver_calls), (2, 1, 3, Some(1000), Some(5)));
        assert!((x.reserved_over_requested.unwrap_or_default() - 1.5).abs() < 1e-9);
        assert_eq!((x.worst_alloc_us, x.warm_driver_calls), (Some(1.5), Some(0.5)));
        assert!(x.smallest_over_requested.is_some(), "found on other devices");
        assert_eq!((y.traces, y.finished, y.ooms, y.warm_ooms), (2, 0, 3, 1));
        assert_eq!((y.reserved_over_requested, y.warm_driver_calls), (None, None));
        assert_eq!((y.allocs, y.driver_calls), (None, None), "no totals of nothing");
        assert!(tabulate(&[x.clone(), y.clone()]).to_string().contains("unfinished"));
    }

    #[test]
    fn totals_saturate() {
        let rows = ["a", "b"].map(|trace| Compared { driver_calls: Some(u64::MAX), ..row(trace, "x", 1.0, None) });
        assert_eq!(summaries(&rows)[0].driver_calls, Some(u64::MAX));
    }

    #[test]
    fn means_need_positive_numbers_and_the_mean_of_one_is_exact() {
        assert_eq!((geometric_mean(&[]), geometric_mean(&[1.0, 0.0]), geometric_mean(&[-1.0])), (None, None, None));
        for figure in [1.080_690_1, 3.0, 0.1, 1234.5] {
            assert_eq!(geometric_mean(&[figure]), Some(figure));
        }
    }
}
