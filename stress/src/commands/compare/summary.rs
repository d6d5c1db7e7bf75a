//! Means, maxima and totals of all programs under some options.

use serde::Serialize;

use super::Row;
use crate::commands::{hundredths, options};
use crate::table::{Table, number, optional, table};

/// All programs under some options: geometric means, the worst, and totals. `compare --help`
/// explains the fields.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Summary {
    pub(super) config: String,
    traces: usize,
    finished: usize,
    pub(super) reserved_over_requested: Option<f64>,
    worst_reserved_over_requested: Option<f64>,
    first_pass_reserved_over_requested: Option<f64>,
    smallest_over_requested: Option<f64>,
    worst_smallest_over_requested: Option<f64>,
    allocs: Option<u64>,
    driver_calls: Option<u64>,
    warm_driver_calls: Option<f64>,
    pub(super) driver_time_modelled_us: Option<f64>,
    warm_driver_time_modelled_us: Option<f64>,
    worst_alloc_us: Option<f64>,
    ns_per_op: Option<f64>,
    times_yardstick: Option<f64>,
    ooms: u64,
    warm_ooms: u64,
    violations: u64,
}

/// A summary for each of the options, in the order in which they first appear.
pub(super) fn summaries(rows: &[Row]) -> Vec<Summary> {
    let mut configs: Vec<&str> = Vec::new();
    for row in rows {
        if !configs.contains(&row.config.as_str()) {
            configs.push(&row.config);
        }
    }
    let of = |config| rows.iter().filter(|row| row.config == config).collect::<Vec<_>>();
    configs.into_iter().map(|config| summarise(config, &of(config))).collect()
}

fn summarise(config: &str, rows: &[&Row]) -> Summary {
    // A program that did not finish took less memory and time than it needs. The smallest device is
    // known nevertheless.
    let finished: Vec<&Row> = rows.iter().copied().filter(|row| row.finished()).collect();
    let mean = |figure| all(&finished, figure).and_then(|figures| geometric_mean(&figures));
    let worst = |figure| all(&finished, figure).and_then(|figures| figures.into_iter().max_by(f64::total_cmp));
    let sum = |figure| all(&finished, figure).map(|figures| hundredths(figures.iter().sum()));
    let count = |figure| (!finished.is_empty()).then(|| total(&finished, figure));
    let smallest = all(rows, |row| row.smallest_over_requested);
    Summary {
        config: config.to_owned(),
        traces: rows.len(),
        finished: finished.len(),
        reserved_over_requested: mean(|row| row.reserved_over_requested),
        worst_reserved_over_requested: worst(|row| row.reserved_over_requested),
        first_pass_reserved_over_requested: mean(|row| row.first_pass_reserved_over_requested),
        smallest_over_requested: smallest.as_deref().and_then(geometric_mean),
        worst_smallest_over_requested: smallest.and_then(|figures| figures.into_iter().max_by(f64::total_cmp)),
        allocs: count(|row| row.allocs),
        driver_calls: finished
            .iter()
            .map(|row| row.driver_calls)
            .collect::<Option<Vec<u64>>>()
            .filter(|calls| !calls.is_empty())
            .map(|calls| calls.into_iter().fold(0, u64::saturating_add)),
        warm_driver_calls: sum(|row| row.warm_driver_calls),
        driver_time_modelled_us: sum(|row| row.driver_time_modelled_us),
        warm_driver_time_modelled_us: sum(|row| row.warm_driver_time_modelled_us),
        worst_alloc_us: worst(|row| row.worst_alloc_us),
        ns_per_op: mean(|row| row.ns_per_op).map(hundredths),
        times_yardstick: mean(|row| Some(row.ns_per_op? / row.yardstick_ns_per_op?)).map(hundredths),
        ooms: total(rows, |row| row.ooms),
        warm_ooms: total(rows, |row| row.warm_ooms),
        violations: total(rows, |row| row.violations),
    }
}

/// A figure of all these programs; `None` unless all have it, as a mean over some of them does not
/// compare with one over all.
fn all(rows: &[&Row], figure: fn(&Row) -> Option<f64>) -> Option<Vec<f64>> {
    let figures = rows.iter().map(|row| figure(row)).collect::<Option<Vec<f64>>>();
    figures.filter(|figures| !figures.is_empty())
}

/// A saturating sum: a file may contain any figures.
fn total(rows: &[&Row], count: fn(&Row) -> u64) -> u64 {
    rows.iter().map(|row| count(row)).fold(0, u64::saturating_add)
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
    let table = table(
        summaries,
        1,
        &[
            ("options", |row| options(&row.config).to_owned()),
            ("holds, ratio", |row| number(row.reserved_over_requested, 3)),
            ("holds, worst", |row| number(row.worst_reserved_over_requested, 3)),
            ("unfinished", |row| (row.traces - row.finished).to_string()),
            ("OOMs", |row| row.ooms.saturating_add(row.warm_ooms).to_string()),
            ("smallest device, ratio", |row| number(row.smallest_over_requested, 3)),
            ("driver calls", |row| optional(row.driver_calls)),
            ("driver ms, modelled", |row| number(row.driver_time_modelled_us.map(|us| us / 1e3), 1)),
            ("ns/op", |row| number(row.ns_per_op, 1)),
            ("later driver calls", |row| number(row.warm_driver_calls, 1)),
            ("smallest device, worst", |row| number(row.worst_smallest_over_requested, 3)),
            ("holds, first pass", |row| number(row.first_pass_reserved_over_requested, 3)),
            ("worst µs, modelled", |row| number(row.worst_alloc_us, 0)),
            ("times yardstick", |row| number(row.times_yardstick, 2)),
        ],
    );
    let programs = summaries.iter().map(|row| row.traces).max().unwrap_or(0);
    let title = format!("All {programs} programs: geometric means, the worst, and totals of driver calls and OOMs:");
    table.grouped(summaries.iter().map(|_| title.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(trace: &str, config: &str, reserved: f64, smallest: Option<f64>) -> Row {
        Row {
            trace: trace.into(),
            config: config.into(),
            reserved_over_requested: Some(reserved),
            smallest_over_requested: smallest,
            allocs: 1000,
            driver_calls: Some(5),
            warm_driver_calls: Some(0.5),
            driver_time_modelled_us: Some(10.0),
            worst_alloc_us: Some(reserved),
            ns_per_op: Some(40.0),
            yardstick_ns_per_op: Some(20.0),
            ..Row::default()
        }
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
        let failed = |trace, config| Row { ooms: 3, ..row(trace, config, 0.5, Some(2.0)) };
        let failed_later = Row { warm_ooms: 1, ..row("a", "y", 0.5, Some(2.0)) };
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
        let rows = ["a", "b"].map(|trace| Row { driver_calls: Some(u64::MAX), ..row(trace, "x", 1.0, None) });
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
