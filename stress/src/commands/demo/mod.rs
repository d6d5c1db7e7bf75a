//! `demo`: a guided run, on recorded programs: why memory runs out while much of it is free, and
//! what helps.

mod compare;
mod play;
mod rows;

use std::path::Path;

use crate::cli::{ConfigArg, DemoArgs};
use crate::exit::{Failure, Outcome};
use crate::input::{self, Program};
use crate::map::Style;
use crate::session::Session;
use crate::text::{Bytes, wrap};
use play::{Exhausted, Moving, Roomy};
use rows::Row;

/// The recorded programs that come with this one: the first is told about, all are compared.
const RECORDINGS: [(&str, &[u8]); 2] = [
    ("gnn_random_graphs.trace.gz", include_bytes!("../../../testdata/gnn_random_graphs.trace.gz")),
    ("gpt2_fp32.trace.gz", include_bytes!("../../../testdata/gpt2_fp32.trace.gz")),
];

/// Memory that stays where it is, as PyTorch's by default.
const SEGMENTS: &str = "backing:segments";

/// How much more than a program needs at most the small device has, in percent.
const SPARE_PERCENT: u64 = 2;

/// Runs the command.
///
/// # Errors
/// When a device cannot be opened, the allocator fails for another reason than lack of memory, or
/// standard output cannot be written.
pub fn run(session: &Session, args: &DemoArgs) -> Result<Outcome, Failure> {
    if session.sim().is_none() {
        session.message("the demonstration needs devices of several sizes, so it uses a simulated one");
        return run(&session.simulated()?, args);
    }
    if let Some(alone) = session.without_other_programs() {
        // Devices are as large as the story needs, and what others hold of them would leave too
        // little for it.
        session.message("warning: other= has no effect here: the demonstration's devices have no other programs");
        return run(&alone, args);
    }
    let teller = Teller { session, style: Style::of_stdout(args.ascii) };
    let programs = recordings()?;
    let Some(program) = programs.first() else { return Ok(Outcome::Done) };
    let told = [teller.roomy(program)?, teller.small(program)?, teller.moving(program)?, teller.what_helps(&programs)?];
    teller.next_steps()?;
    Ok(told.into_iter().max().unwrap_or(Outcome::Done))
}

fn recordings() -> Result<Vec<Program>, Failure> {
    let mut programs = Vec::new();
    for (name, bytes) in RECORDINGS {
        programs.extend(input::read(Path::new(name), bytes)?);
    }
    Ok(programs)
}

/// Tells the story. Each chapter says whether it went as it should.
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

    fn roomy(&self, program: &Program) -> Result<Outcome, Failure> {
        let told = play::roomy(self.session, program)?;
        self.session.row(&Row::replay(program, &told))?;
        let Roomy { device_bytes, reserved, live, segments, unused, pieces, in_pieces, map, ooms, hazards } = told;
        let (peak, size) = (Bytes(program.peak_requested_bytes), Bytes(device_bytes));
        if ooms == 0 {
            self.heading(&format!("1. A program that needs {peak} takes {}", Bytes(reserved)))?;
        } else {
            self.out_of_memory(program, SEGMENTS, ooms, size);
            self.heading(&format!("1. A program that needs {peak} is refused some of it on a device of {size}"))?;
        }
        let what = program.headers.iter().find(|(key, _)| key == "what").map_or("", |(_, value)| value);
        self.say(&format!(
            "{} is the recording of a PyTorch program: {what}. In {} allocations and frees it never uses more than {peak} \
             at once. Here it is replayed on a simulated device of {} by PyTorch's rules (backing:segments): the allocator takes a \
             segment from the device when no free block is large enough, cuts blocks from it, and keeps it.",
            program.name,
            program.operations(),
            size,
        ))?;
        self.say(&format!(
            "When it held most, it held {} in {segments} segments for {} of live data:",
            Bytes(reserved),
            Bytes(live)
        ))?;
        self.session.show(format_args!("{}\n", map.draw(self.style)))?;
        self.say(&format!(
            "{} are segments that nobody uses; {} lie in {pieces} pieces between live blocks. Sizes change from step to \
             step here, so a request often fits none of them, and one more segment is taken.",
            Bytes(unused),
            Bytes(in_pieces)
        ))?;
        Ok(outcome(hazards).max(if ooms == 0 { Outcome::Done } else { Outcome::OutOfMemory }))
    }

    fn small(&self, program: &Program) -> Result<Outcome, Failure> {
        let capacity = small(program);
        let told = play::exhausted(self.session, program, capacity)?;
        self.session.row(&Row::oom(program, capacity, &told))?;
        let Exhausted { report, event, events, map, blocks, damaged, served_again, hazards } = told;
        let size = Bytes(capacity);
        let Some(report) = report else {
            self.heading(&format!("2. On a device of {size} it just finishes"))?;
            return Ok(outcome(hazards).max(self.intact(program, damaged)));
        };
        let free = report.free_in_pool + report.memory.map_or(0, |memory| memory.free);
        self.heading(&format!("2. On a device of {size} it runs out of memory while {} are free", Bytes(free)))?;
        self.say(&format!(
            "That is {SPARE_PERCENT} % more than it ever uses. Unused segments are given back when the device is full, but \
             those with a live block in them cannot be. At event {event} of {events} that is not enough:"
        ))?;
        self.session.show(format_args!("{report}\n\n{}\n", map.draw(self.style)))?;
        let intact = self.intact(program, damaged);
        if !served_again {
            let requested = Bytes(report.requested);
            self.session.message(format_args!("error: {}: {requested} are refused after all was freed", program.name));
        }
        let none = |count: u64| if count == 0 { "none".to_owned() } else { count.to_string() };
        let (damaged, hazards_found) = (none(damaged as u64), none(hazards));
        self.heading("3. Nothing is lost")?;
        self.say(&format!(
            "An error is all that happened. Of {blocks} live blocks, each filled with known content before, {damaged} read \
             differently now. When the program has freed its blocks, the {} are {}. The simulated device has checked every \
             access, and found {hazards_found} that nothing orders.",
            Bytes(report.requested),
            if served_again { "served" } else { "STILL REFUSED" },
        ))?;
        Ok(outcome(hazards).max(intact).max(if served_again { Outcome::Done } else { Outcome::Failed }))
    }

    fn moving(&self, program: &Program) -> Result<Outcome, Failure> {
        let capacity = small(program);
        let told = play::moving(self.session, program, capacity)?;
        self.session.row(&Row::remap(program, capacity, &told))?;
        let Moving { report, why_segments, reserved, remaps, granules_moved, damaged, hazards } = told;
        let intact = self.intact(program, damaged);
        let mut ended = outcome(hazards).max(intact);
        if report.is_some() {
            self.out_of_memory(program, "the defaults", 1, Bytes(capacity));
            ended = ended.max(Outcome::OutOfMemory);
        }
        if let Some(why) = why_segments {
            self.heading("4. Memory cannot move on this device")?;
            self.say(&format!(
                "By default memory is mapped in granules, which move to where contiguous addresses are needed. Here that is not \
                 possible: {why}. So the program {} as before.",
                if report.is_some() { "runs out of memory" } else { "finishes" },
            ))?;
            return Ok(ended);
        }
        if let Some(report) = report {
            self.heading("4. Even memory that moves does not suffice here")?;
            self.session.show(format_args!("{report}\n"))?;
            return Ok(ended);
        }
        let peak = Bytes(program.peak_requested_bytes);
        self.heading(&format!("4. With memory that moves, it finishes there: {} for {peak}", Bytes(reserved)))?;
        self.say(&format!(
            "That is what happens by default. Memory is mapped in granules, and where no free block is large enough, granules \
             of free blocks that the device is done with move to where contiguous addresses are needed. Here that happened \
             {remaps} times, with {granules_moved} granules of 2 MiB. Live data never moves: {} of its blocks read differently.",
            if damaged == 0 { "none".to_owned() } else { damaged.to_string() },
        ))?;
        Ok(ended)
    }

    fn what_helps(&self, programs: &[Program]) -> Result<Outcome, Failure> {
        self.heading("5. What helps")?;
        let compared = compare::compare(self.session, programs)?;
        for row in &compared {
            self.session.row(&Row::compare(row))?;
        }
        self.say(
            "Two recordings under several options: what each takes from a device with plenty, how often it asks the driver \
             for memory, and the smallest device on which it fits; beside the sizes, how many times what it uses that is.",
        )?;
        self.session.show(format_args!("{}\n", compare::tabulate(&compared)))?;
        if let Some(findings) = programs.first().and_then(|program| compare::findings(&program.name, &compared)) {
            self.say(&findings)?;
        }
        Ok(compared.iter().map(compare::Compared::outcome).max().unwrap_or(Outcome::Done))
    }

    /// Says that a program lacked memory: the story and the rows do not tell that the run ends with
    /// it.
    fn out_of_memory(&self, program: &Program, options: &str, ooms: u64, device: Bytes) {
        let (name, requests) = (&program.name, if ooms == 1 { "request was" } else { "requests were" });
        self.session.message(format_args!(
            "out of memory: {name} with {options}: {ooms} {requests} refused on a device of {device}"
        ));
    }

    /// How it ends for blocks that did not read as they were written.
    fn intact(&self, program: &Program, damaged: usize) -> Outcome {
        if damaged == 0 {
            return Outcome::Done;
        }
        self.session.message(format_args!("error: {}: {damaged} blocks did not read as written", program.name));
        Outcome::Failed
    }

    fn next_steps(&self) -> Result<(), Failure> {
        self.heading("What to try next")?;
        let program = own_name(std::env::var_os("CARGO").is_some(), std::env::args().next());
        let ways = format!("{} ways to run out of memory, the reports, and the ways out", crate::ways::ALL.len());
        let mut text = String::new();
        for (arguments, meaning) in [
            ("fragmentation", "five synthetic programs that fragment memory, under several options"),
            ("oom", &ways),
            ("replay snapshot.pickle", "your own program, from torch.cuda.memory._dump_snapshot()"),
            ("fit --config '' --config backing:segments snapshot.pickle", "the smallest device for it"),
            ("bench", "how fast the allocator is"),
            ("--help", "everything else"),
        ] {
            text += &format!("  {program} {arguments}\n      {meaning}\n");
        }
        self.session.show(text.trim_end())
    }
}

/// How the program is run: through cargo, or as the user called it.
fn own_name(by_cargo: bool, called: Option<String>) -> String {
    match called {
        _ if by_cargo => "cargo run --release --".to_owned(),
        Some(name) if !name.is_empty() => name,
        _ => "aquifer-stress".to_owned(),
    }
}

/// A device with little more than the program needs at most.
fn small(program: &Program) -> u64 {
    (program.peak_requested_bytes / 100 * (100 + SPARE_PERCENT)).next_multiple_of(2 << 20)
}

fn outcome(hazards: u64) -> Outcome {
    if hazards == 0 { Outcome::Done } else { Outcome::Hazards }
}

/// Options that the demonstration compares: some of its own, and those that the user gave.
fn policies(session: &Session) -> Result<Vec<ConfigArg>, Failure> {
    const OWN: [&str; 6] = [
        "",
        "backing:segments",
        "backing:segments,roundup_power2_divisions:8",
        "backing:segments,garbage_collection_threshold:0.8",
        "backing:segments,max_split_size_mb:128",
        "no_cache:True",
    ];
    let parsed = OWN.iter().map(|text| text.parse::<ConfigArg>());
    let mut policies = parsed.collect::<Result<Vec<_>, _>>().map_err(|error| Failure::Usage(error.to_string()))?;
    for config in session.configs() {
        if policies.iter().all(|policy| policy.config != config.config) {
            policies.push(config.clone());
        }
    }
    Ok(policies)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_to_try_next_can_be_typed() {
        assert_eq!(own_name(true, Some("target/release/aquifer-stress".to_owned())), "cargo run --release --");
        assert_eq!(own_name(false, Some("./aquifer-stress".to_owned())), "./aquifer-stress");
        assert_eq!(own_name(false, None), "aquifer-stress");
    }

    #[test]
    fn recordings_are_sound() {
        let programs = recordings().unwrap();
        assert_eq!(programs.len(), RECORDINGS.len());
        assert!(programs.iter().all(|program| program.notes.is_empty()));
    }
}
