//! `options`: lists the options of allocators.

use crate::exit::{Failure, Outcome};
use crate::session::Session;

/// Lists the options, as the documentation of `Config` has them, for a terminal.
///
/// # Errors
/// When standard output cannot be written to.
pub fn run(session: &Session) -> Result<Outcome, Failure> {
    for line in aquifer_allocator::config::OPTIONS.lines() {
        let line = line.replace("[`", "").replace("`]", "").replace(['`', '*'], "");
        match line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>()[..] {
            ["option" | "---", ..] => {}
            [name, values, default, effect] => {
                let default = if default.is_empty() { String::new() } else { format!("; default {default}") };
                session.show(format_args!("  {name}: {values}{default}\n      {effect}"))?;
            }
            _ => session.show(line)?,
        }
    }
    Ok(Outcome::Done)
}
