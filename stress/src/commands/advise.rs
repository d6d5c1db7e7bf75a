//! `advise`: what would help a recorded program.

use aquifer_trace::profile::Profile;
use serde::Serialize;

use crate::cli::AdviseArgs;
use crate::commands::study::advice::{Advice, advise};
use crate::commands::study::{Case, Study};
use crate::commands::{all_programs, on_simulator};
use crate::exit::{Failure, Outcome};
use crate::map::Style;
use crate::session::Session;
use crate::text::wrap;

/// A piece of advice for a program, as JSON.
#[derive(Debug, Serialize)]
struct Row<'a> {
    trace: &'a str,
    #[serde(flatten)]
    advice: &'a Advice,
}

/// Runs the command.
///
/// # Errors
/// When standard output cannot be written.
pub fn run(session: &Session, args: &AdviseArgs) -> Result<Outcome, Failure> {
    session.config()?;
    let simulated = on_simulator(session, "advise")?;
    let session = simulated.as_ref().unwrap_or(session);
    let mut outcome = Outcome::Done;
    for (name, program) in &all_programs(session, &args.files, &mut outcome) {
        let study = Study::of(session, name, program, Profile::of(program), 0);
        match study {
            Ok(study) => {
                let advice = advise(session, name, program, &study);
                session.show(format_args!("{name}\n"))?;
                advice.iter().try_for_each(|advice| session.row(&Row { trace: name, advice }))?;
                show(session, &study, &advice)?;
            }
            Err(failure) => {
                outcome = outcome.max(failure.outcome());
                session.message(format_args!("error: {name}: {failure}"));
            }
        }
    }
    Ok(outcome)
}

/// Writes advice as text.
///
/// # Errors
/// When standard output cannot be written.
pub(super) fn show(session: &Session, study: &Study, advice: &[Advice]) -> Result<(), Failure> {
    if advice.is_empty() {
        let finishes = study.usual().is_none_or(Case::finishes);
        let why = if finishes { "helps: the program needs what it uses" } else { "finishes on this device" };
        return session.show(format_args!("Nothing that was tried {why}.\n"));
    }
    let width = Style::of_stdout(false).width.saturating_sub(4);
    for Advice { title, text, .. } in advice {
        let text: Vec<String> = wrap(text, width).lines().map(|line| format!("    {line}")).collect();
        session.show(format_args!("{title}\n{}\n", text.join("\n")))?;
    }
    Ok(())
}
