//! Shared prefixes: open behind what others have sealed, and seal.
