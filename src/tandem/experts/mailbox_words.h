// Words of a mailbox's header, 32 bits each. Both ends read this file: the CPU's (csrc/experts/handoff/mailbox.cc), the
// GPU's (mailbox_kernels.cu) and what launches it. csrc/experts/handoff/mailbox.h draws the memory, and says who
// writes.
#ifndef TANDEM_MAILBOX_WORDS_H
#define TANDEM_MAILBOX_WORDS_H

enum MailboxWord {
  kPosted = 0,
  kLayer = 1,
  kTokens = 2,
  kFlags = 3,
  kDone = 32,
  kFailed = 64,
  kGaveUp = 96,
  kHinted = 128,
  kHintLayer = 129,
  kHintIds = 130
};

#endif
