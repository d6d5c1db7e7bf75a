//! `replay`: what a recorded program needs of memory, driver and time.

use std::collections::BTreeMap;

use aquifer_allocator::Bytes;
use aquifer_device::Device;
use comfy_table::Table;
use serde::Serialize;

use crate::cli::{ConfigArg, ReplayArgs};
use crate::commands::{hundredths, programs, ratio};
use crate::exit::{Failure, Outcome};
use crate::harness::{OnOom, Player, Times};
use crate::input::Program;
use crate::session::Session;
use crate::subject::{Aquifer, Subject};
use crate::table::table;
use crate::yardstick::Yardstick;

/// A row of results. `replay --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "the help text explains them")]
#[non_exhaustive]
pub struct Row {
    pub trace: String,
    pub config: String,
    pub device: String,
    pub events: u64,
    pub peak_requested_bytes: u64,
    pub peak_allocated_bytes: u64,
    pub peak_reserved_bytes: u64,
    pub reserved_over_requested: Option<f64>,
    pub ns_per_op: f64,
    pub first_pass_ns_per_op: f64,
    pub driver_calls: BTreeMap<&'static str, u64>,
    pub ooms: u64,
    pub retries: u64,
    pub events_recorded: u64,
    pub stream_waits: u64,
    pub hazards: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yardstick_ns_per_op: Option<f64>,
}

/// Runs the command.
///
/// # Errors
/// When standard output cannot be written.
pub fn run(session: &Session, args: &ReplayArgs) -> Result<Outcome, Failure> {
    let mut outcome = Outcome::Done;
    let mut rows = Vec::new();
    for file in &args.files {
        let programs = match programs(session, file) {
            Ok(programs) => programs,
            Err(failure) => {
                outcome = outcome.max(failure.outcome());
                session.message(format_args!("error: {failure}"));
                continue;
            }
        };
        for (name, program) in &programs {
            for config in session.configs() {
                let row = match replay(session, name, program, config, args) {
                    Ok(row) => row,
                    Err(failure) => {
                        outcome = outcome.max(failure.outcome());
                        session.message(format_args!("error: {name}: {failure}"));
                        continue;
                    }
                };
                outcome = outcome.max(row.outcome());
                session.row(&row)?;
                rows.push(row);
            }
        }
    }
    if !rows.is_empty() {
        session.show(tabulate(&rows, args))?;
    }
    Ok(outcome)
}

fn replay(
    session: &Session,
    name: &str,
    program: &Program,
    config: &ConfigArg,
    args: &ReplayArgs,
) -> Result<Row, Failure> {
    let device = session.open()?;
    let subject = Aquifer::new(session, &device, config, program.streams.len())?;
    let allocator = subject.allocator().clone();
    let mut aquifer = Timed::new(subject, program);
    let yardstick = || Timed::new(Yardstick::new(program.peak_requested_bytes, program.slots), program);
    let mut yardstick = args.yardstick.then(yardstick);
    let mut in_turns = || {
        let ooms = aquifer.pass()?;
        let missed = yardstick.as_mut().map_or(Ok(0), Timed::pass)?;
        Ok::<_, Failure>((ooms, missed))
    };

    let bar = session.progress(args.repeat.into(), name);
    let (calls, timelines) = (device.driver_calls(), device.timeline_counts());
    let (ooms, missed) = in_turns()?;
    let (calls, counts) = (device.driver_calls().since(&calls), device.timeline_counts());
    let stats = allocator.memory_stats();
    bar.inc(1);
    for _ in 1..args.repeat {
        in_turns()?;
        bar.inc(1);
    }
    bar.finish_and_clear();

    if missed > 0 {
        session.message(format_args!("warning: {name}: the yardstick counts to 2 TiB and refused {missed} requests"));
    }
    Ok(Row {
        trace: name.to_owned(),
        config: config.text.clone(),
        device: session.device_text().to_owned(),
        events: program.operations(),
        peak_requested_bytes: program.peak_requested_bytes,
        peak_allocated_bytes: stats.allocated_bytes.all.peak,
        peak_reserved_bytes: stats.reserved_bytes.all.peak,
        reserved_over_requested: ratio(stats.reserved_bytes.all.peak, program.peak_requested_bytes),
        ns_per_op: hundredths(aquifer.times.later()),
        first_pass_ns_per_op: hundredths(aquifer.times.first()),
        driver_calls: calls.iter().map(|(operation, count)| (operation.name(), count)).collect(),
        ooms,
        retries: stats.num_alloc_retries,
        events_recorded: counts.events_recorded - timelines.events_recorded,
        stream_waits: counts.waits_inserted - timelines.waits_inserted,
        hazards: hazards(session, name, &device),
        yardstick_ns_per_op: yardstick.map(|yardstick| hundredths(yardstick.times.later())),
    })
}

/// A subject that plays a program again and again.
struct Timed<'a, S: Subject> {
    subject: S,
    player: Player<'a, S>,
    times: Times,
    operations: u64,
}

impl<'a, S: Subject> Timed<'a, S> {
    fn new(subject: S, program: &'a Program) -> Self {
        Timed { subject, player: Player::new(program), times: Times::default(), operations: program.operations() }
    }

    /// One more pass; tells how many requests were refused.
    fn pass(&mut self) -> Result<u64, Failure> {
        let pass = self.player.pass(&mut self.subject, OnOom::Skip)?;
        self.times.add(pass.elapsed, self.operations);
        Ok(pass.ooms)
    }
}

impl Row {
    fn outcome(&self) -> Outcome {
        match self {
            Row { hazards: 1.., .. } => Outcome::Hazards,
            Row { ooms: 1.., .. } => Outcome::OutOfMemory,
            _ => Outcome::Done,
        }
    }
}

/// Counts what the race detector found and shows the beginning of it.
pub(super) fn hazards(session: &Session, name: &str, device: &Device) -> u64 {
    const SHOWN: u64 = 3;
    let mut count = 0;
    while let Some(violation) = device.driver().take_violation() {
        count += 1;
        if count <= SHOWN {
            session.message(format_args!("hazard: {name}: {violation}"));
        }
    }
    count
}

fn tabulate(rows: &[Row], args: &ReplayArgs) -> Table {
    let mut headings = vec!["trace", "config", "requested", "reserved", "ratio", "ns/op", "first pass"];
    headings.extend(args.yardstick.then_some(["yardstick", "times"]).into_iter().flatten());
    headings.extend(["driver calls", "OOMs", "retries", "waits", "hazards"]);
    let mut table = table(&headings, 2);
    for row in rows {
        let ratio = row.reserved_over_requested.map_or_else(String::new, |ratio| format!("{ratio:.3}"));
        let mut cells = vec![
            row.trace.clone(),
            row.config.clone(),
            Bytes(row.peak_requested_bytes).to_string(),
            Bytes(row.peak_reserved_bytes).to_string(),
            ratio,
            format!("{:.1}", row.ns_per_op),
            format!("{:.1}", row.first_pass_ns_per_op),
        ];
        if let Some(yardstick) = row.yardstick_ns_per_op {
            cells.push(format!("{yardstick:.1}"));
            cells.push(format!("{:.2}", row.ns_per_op / yardstick));
        }
        let calls: u64 = row.driver_calls.values().sum();
        cells.extend([calls, row.ooms, row.retries, row.stream_waits, row.hazards].map(|count| count.to_string()));
        table.add_row(cells);
    }
    table
}
