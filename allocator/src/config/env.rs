//! Options from environment variables.

use std::ffi::OsString;

use super::Config;
use super::error::{ConfigError, ConfigErrorKind};

/// Variables that hold an option string; the first that is set counts.
const VARIABLES: [&str; 3] = ["AQUIFER_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];

/// The variable that turns caching off, regardless of the option string.
const NO_CACHING: &str = "PYTORCH_NO_CUDA_MEMORY_CACHING";

/// The configuration from the variables that `lookup` gives.
pub(super) fn read(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Config, ConfigError> {
    let no_cache = lookup(NO_CACHING).is_some_and(|value| !value.is_empty() && value != "0");
    let mut config = Config { no_cache, ..Config::default() };
    let Some((variable, value)) = VARIABLES.iter().find_map(|name| Some((*name, lookup(name)?))) else {
        return Ok(config);
    };
    let text = value.to_str().ok_or_else(|| ConfigError::new(ConfigErrorKind::NotUnicode).read_from(variable))?;
    config.apply(text).map_err(|error| error.read_from(variable))?;
    Ok(config)
}
