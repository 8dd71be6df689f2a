/* Moves the wall clock of one process ahead by CLOCK_AHEAD_S seconds: preloaded. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *found)
{
	const char *ahead = getenv("CLOCK_AHEAD_S");
	int failed = syscall(SYS_clock_gettime, id, found);

	if (!failed && ahead && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
		found->tv_sec += atol(ahead);
	return failed;
}

time_t time(time_t *found)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	if (found)
		*found = now.tv_sec;
	return now.tv_sec;
}
