//! `explain`: what a recorded program uses memory for, what allocators make of it, why memory runs
//! out, and what helps.

use aquifer::memory::OomReport;
use serde::Serialize;

use crate::cards::smallest_card;
use crate::cli::ExplainArgs;
use crate::commands::advise::show;
use crate::commands::study::advice::{Advice, advise};
use crate::commands::study::{Case, Exhausted, Study};
use crate::commands::{all_programs_and_states, options, ratio};
use crate::exit::{Failure, Outcome};
use crate::input::Program;
use crate::map::{Figures, Map, Style};
use crate::profile::{Group, Grouping, Peak};
use crate::session::Session;
use crate::table::{number, optional, table};
use crate::text::{Bytes, wrap};

/// Groups that are listed of each grouping.
const LISTED: usize = 8;

/// A program, as JSON. `explain --help` explains the fields.
#[derive(Debug, Serialize)]
struct Row<'a> {
    trace: &'a str,
    events: u64,
    streams: usize,
    peak_requested_bytes: u64,
    peak_event: u64,
    peak_blocks: u64,
    alive: Vec<Alive<'a>>,
    allocators: Vec<Allocator<'a>>,
    oom: Option<Oom<'a>>,
    advice: &'a [Advice],
}

/// A group of blocks that are live at the peak.
#[derive(Debug, Serialize)]
struct Alive<'a> {
    by: &'a str,
    name: &'a str,
    detail: &'a str,
    bytes: u64,
    blocks: u64,
}

/// What an allocator makes of the program.
#[derive(Debug, Serialize)]
struct Allocator<'a> {
    name: &'a str,
    config: &'a str,
    peak_reserved_bytes: u64,
    reserved_over_requested: Option<f64>,
    smallest_device_bytes: Option<u64>,
    smallest_card: Option<&'static str>,
    ooms: usize,
    driver_calls: u64,
    driver_time_modelled_us: Option<f64>,
}

/// How the program runs out of memory with PyTorch's default options.
#[derive(Debug, Serialize)]
struct Oom<'a> {
    device_bytes: u64,
    event: u64,
    requested_bytes: u64,
    free_bytes: u64,
    largest_free_bytes: u64,
    report: Option<String>,
    finishes_with: Vec<&'a str>,
}

/// Runs the command.
///
/// # Errors
/// When an allocator fails for another reason than lack of memory, or standard output cannot be
/// written.
pub fn run(session: &Session, args: &ExplainArgs) -> Result<Outcome, Failure> {
    if session.sim().is_none() {
        session.message("explain needs devices of several sizes, so it uses simulated ones");
        return run(&session.simulated()?.unchecked(), args);
    }
    let mut outcome = Outcome::Done;
    let teller = Teller { session, style: Style::of_stdout(args.ascii) };
    for file in &args.files {
        let programs = all_programs_and_states(session, std::slice::from_ref(file), &mut outcome);
        let mut studies = Vec::new();
        for (name, program) in &programs {
            match Study::of(session, name, program, 0) {
                Ok(study) => studies.push((&**name, program, study)),
                Err(failure) => {
                    outcome = outcome.max(failure.outcome());
                    session.message(format_args!("error: {name}: {failure}"));
                }
            }
        }
        teller.job(&studies)?;
    }
    Ok(outcome)
}

fn row<'a>(name: &'a str, program: &Program, study: &'a Study, advice: &'a [Advice]) -> Row<'a> {
    let Peak { event, bytes, blocks, .. } = study.profile.peak;
    let alive = study.profile.groups.iter().flat_map(|grouping| {
        let live = grouping.rows.iter().filter(|group| group.peak_blocks > 0);
        live.map(|group| Alive {
            by: grouping.by,
            name: &group.name,
            detail: &group.detail,
            bytes: group.peak_bytes,
            blocks: group.peak_blocks,
        })
    });
    let allocator = |case: &'a Case| Allocator {
        name: &case.manager.name,
        config: &case.manager.config.text,
        peak_reserved_bytes: case.sampled.peak_reserved,
        reserved_over_requested: ratio(case.sampled.peak_reserved, bytes),
        smallest_device_bytes: case.smallest_device,
        smallest_card: case.smallest_device.and_then(smallest_card),
        ooms: case.sampled.refused_at.len(),
        driver_calls: case.sampled.calls,
        driver_time_modelled_us: case.sampled.driver_us,
    };
    Row {
        trace: name,
        events: study.profile.buckets.events,
        streams: program.streams.len(),
        peak_requested_bytes: bytes,
        peak_event: event,
        peak_blocks: blocks,
        alive: alive.collect(),
        allocators: study.cases.iter().map(allocator).collect(),
        oom: study.exhausted.as_ref().map(|exhausted| oom(exhausted, study)),
        advice,
    }
}

fn oom<'a>(exhausted: &Exhausted, study: &'a Study) -> Oom<'a> {
    let figures = exhausted.refusal.map.figures();
    let device_free = exhausted.device_free();
    Oom {
        device_bytes: exhausted.device_bytes,
        event: exhausted.refusal.event,
        requested_bytes: exhausted.refusal.refusal.bytes,
        free_bytes: figures.free + device_free,
        largest_free_bytes: figures.largest_free.max(device_free),
        report: exhausted.refusal.refusal.report.as_deref().map(OomReport::to_string),
        finishes_with: study.finishing(exhausted).map(|case| &*case.manager.name).collect(),
    }
}

/// Tells the story as text.
struct Teller<'a> {
    session: &'a Session,
    style: Style,
}

impl Teller<'_> {
    fn say(&self, text: &str) -> Result<(), Failure> {
        self.session.show(format_args!("{}\n", wrap(text, self.style.width)))
    }

    fn heading(&self, text: &str) -> Result<(), Failure> {
        let line = if self.style.ascii { "-" } else { "─" };
        self.session.show(format_args!("{text}\n{}", line.repeat(text.chars().count())))
    }

    /// Tells of the programs of a file or folder: of the one that needs most in detail, and of the
    /// others in a table, as they are the ranks of a job.
    fn job(&self, studies: &[(&str, &Program, Study)]) -> Result<(), Failure> {
        let needs = |study: &Study| study.cases.iter().map(|case| case.sampled.peak_reserved).max();
        let Some(most) = studies.iter().max_by_key(|(.., study)| needs(study)) else { return Ok(()) };
        if studies.len() > 1 {
            self.ranks(studies, most.0)?;
        }
        for told @ (name, program, study) in studies {
            let in_detail = std::ptr::eq(told, most);
            let advise_it = in_detail && program.has_history;
            let advice = if advise_it { advise(self.session, name, program, study)? } else { Vec::new() };
            self.session.row(&row(name, program, study, &advice))?;
            if in_detail {
                self.tell(name, program, study, &advice)?;
            }
        }
        Ok(())
    }

    fn ranks(&self, studies: &[(&str, &Program, Study)], most: &str) -> Result<(), Failure> {
        self.heading(&format!("{} programs, of which {most} needs most", studies.len()))?;
        let last = |study: &Study| study.cases.last().and_then(|case| case.smallest_device);
        let rows: Vec<_> = studies.iter().map(|(name, _, study)| (*name, study, last(study))).collect();
        let table = table(
            &rows,
            1,
            &[
                ("program", |(name, ..)| (*name).to_owned()),
                ("uses", |(_, study, _)| Bytes(study.profile.peak.bytes).to_string()),
                ("PyTorch takes", |(_, study, _)| {
                    optional(study.usual().map(|case| Bytes(case.sampled.peak_reserved)))
                }),
                ("and fits on", |(_, study, _)| {
                    optional(study.usual().and_then(|case| case.smallest_device).map(Bytes))
                }),
                ("with Aquifer on", |(.., smallest)| optional(smallest.map(Bytes))),
            ],
        );
        self.session.show(format_args!("{table}\n"))
    }

    fn tell(&self, name: &str, program: &Program, study: &Study, advice: &[Advice]) -> Result<(), Failure> {
        self.usage(name, program, study)?;
        self.recorded(program)?;
        if !program.has_history {
            return self.say(
                "The snapshot has no history, so nothing is known of the time before. Turn it on with \
                 torch.cuda.memory._record_memory_history() before the program allocates.",
            );
        }
        self.allocators(study)?;
        self.fragmentation(study)?;
        match &study.exhausted {
            Some(exhausted) => self.exhausted(study, exhausted)?,
            None => self.say("With PyTorch's default options it finishes on a device of 2 % more than it uses.")?,
        }
        self.advice(advice)
    }

    fn usage(&self, name: &str, program: &Program, study: &Study) -> Result<(), Failure> {
        let profile = &study.profile;
        let Peak { event, bytes, blocks, iteration, .. } = profile.peak;
        self.heading(&format!("{name} uses at most {}", Bytes(bytes)))?;
        let what = program.headers.iter().find(|(key, _)| key == "what");
        let what = what.map_or_else(String::new, |(_, value)| format!("It is {value}. "));
        let streams = match program.streams.len() {
            1 => "one stream".to_owned(),
            several => format!("{several} streams"),
        };
        let during =
            if profile.buckets.iteration.is_some() { format!(", in iteration {iteration}") } else { String::new() };
        self.say(&format!(
            "{what}The recording has {} events on {streams}. Most is in use after event {event}{during}: {} in {blocks} \
             blocks.",
            profile.buckets.events,
            Bytes(bytes)
        ))?;
        self.session.show("Live then:")?;
        profile.groups.iter().try_for_each(|grouping| self.alive(grouping, bytes))
    }

    fn alive(&self, grouping: &Grouping, peak: u64) -> Result<(), Failure> {
        let mut live: Vec<&Group> = grouping.rows.iter().filter(|group| group.peak_blocks > 0).collect();
        live.sort_by_key(|group| std::cmp::Reverse(group.peak_bytes));
        let left_out = live.len().saturating_sub(LISTED);
        let rest: u64 = live.iter().skip(LISTED).map(|group| group.peak_bytes).sum();
        live.truncate(LISTED);
        let rows: Vec<(&Group, u64)> = live.into_iter().map(|group| (group, peak)).collect();
        let table = table(
            &rows,
            1,
            &[
                (grouping.title, |(group, _)| group.name.clone()),
                ("bytes", |(group, _)| Bytes(group.peak_bytes).to_string()),
                ("share", |(group, peak)| number(ratio(group.peak_bytes * 100, *peak), 1) + " %"),
                ("blocks", |(group, _)| group.peak_blocks.to_string()),
            ],
        );
        self.session.show(table)?;
        match left_out {
            0 => self.session.show(""),
            _ => self.session.show(format_args!("and {} in {left_out} more rows\n", Bytes(rest))),
        }
    }

    /// What lay where at the end of a snapshot.
    fn recorded(&self, program: &Program) -> Result<(), Failure> {
        if program.memory.is_empty() {
            return Ok(());
        }
        let map = Map::new(program.memory.clone(), 0, 0).held_only();
        let Figures { live, free, waiting, largest_free, segments } = map.figures();
        self.heading(&format!("When the snapshot was taken, {} were held", Bytes(live + free + waiting)))?;
        let waiting = match waiting {
            0 => String::new(),
            bytes => format!(" {} had been given back and were still in use by a stream.", Bytes(bytes)),
        };
        self.say(&format!(
            "In {segments} segments, {} were live and {} free, the largest piece of them {}.{waiting}",
            Bytes(live),
            Bytes(free),
            Bytes(largest_free)
        ))?;
        self.session.show(format_args!("{}\n", map.draw(self.style)))
    }

    fn allocators(&self, study: &Study) -> Result<(), Failure> {
        self.heading("What allocators take for it")?;
        let peak = study.profile.peak.bytes;
        let rows: Vec<(&Case, u64)> = study.cases.iter().map(|case| (case, peak)).collect();
        let table = table(
            &rows,
            2,
            &[
                ("allocator", |(case, _)| case.manager.name.clone()),
                ("options", |(case, _)| options(&case.manager.options).to_owned()),
                ("takes", |(case, _)| Bytes(case.sampled.peak_reserved).to_string()),
                ("ratio", |(case, peak)| number(ratio(case.sampled.peak_reserved, *peak), 3)),
                ("fits on", |(case, _)| optional(case.smallest_device.map(Bytes))),
                ("smallest card", |(case, _)| optional(case.smallest_device.and_then(smallest_card))),
                ("driver calls", |(case, _)| case.sampled.calls.to_string()),
                ("driver ms", |(case, _)| number(case.sampled.driver_us.map(|us| us / 1e3), 0)),
                ("OOMs", |(case, _)| case.sampled.refused_at.len().to_string()),
            ],
        );
        self.session.show(format_args!("{table}\n"))
    }

    fn fragmentation(&self, study: &Study) -> Result<(), Failure> {
        let Some(usual) = study.usual() else { return Ok(()) };
        let Some(map) = &usual.sampled.fullest else { return Ok(()) };
        let Figures { live, free, segments, .. } = map.figures();
        self.heading(&format!("What fragmentation costs: {}", Bytes(study.unused(usual))))?;
        self.say(&format!(
            "When PyTorch holds most, {} in {segments} segments, {} are live and {} are free in its cache: the \
             program never needed more than {}. A request takes new memory if no free piece is large enough.",
            Bytes(usual.sampled.peak_reserved),
            Bytes(live),
            Bytes(free),
            Bytes(study.profile.peak.bytes)
        ))?;
        self.session.show(format_args!("{}\n", map.held_only().draw(self.style)))
    }

    fn exhausted(&self, study: &Study, exhausted: &Exhausted) -> Result<(), Failure> {
        let Exhausted { device_bytes, chosen, refusal } = exhausted;
        let size = Bytes(*device_bytes);
        let Oom { free_bytes, largest_free_bytes, finishes_with, .. } = oom(exhausted, study);
        let requested = Bytes(refusal.refusal.bytes);
        self.heading(&format!(
            "On a device of {size}, PyTorch runs out of memory while {} are free",
            Bytes(free_bytes)
        ))?;
        let why = if *chosen { "" } else { "That is 2 % more than the program ever uses. " };
        self.say(&format!(
            "{why}Event {} of {} asks for {requested}, and the largest free piece has {}:",
            refusal.event,
            study.profile.buckets.events,
            Bytes(largest_free_bytes)
        ))?;
        let report = refusal.refusal.report.as_deref().map_or_else(String::new, |report| format!("{report}\n\n"));
        self.session.show(format_args!("{report}{}\n", refusal.map.draw(self.style)))?;
        self.say(&match &finishes_with[..] {
            [] => "None of the allocators above finishes there.".to_owned(),
            names => format!("It finishes there with: {}.", names.join("; ")),
        })
    }

    fn advice(&self, advice: &[Advice]) -> Result<(), Failure> {
        self.heading("What helps")?;
        show(self.session, advice)
    }
}
